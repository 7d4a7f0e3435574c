# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of whole models."""
