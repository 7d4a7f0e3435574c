# SPDX-License-Identifier: BSD-3-Clause
"""DTensors among the arguments of ops and public functions."""
