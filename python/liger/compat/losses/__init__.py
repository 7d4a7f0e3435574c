# SPDX-License-Identifier: BSD-3-Clause
"""liger_kernel's losses."""
