# SPDX-License-Identifier: BSD-3-Clause
"""liger_kernel's functions and classes that patch models and trainers."""
