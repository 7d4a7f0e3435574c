# SPDX-License-Identifier: BSD-3-Clause
"""The gated experts of a mixture of experts."""
