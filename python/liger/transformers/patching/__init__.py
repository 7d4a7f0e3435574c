# SPDX-License-Identifier: BSD-3-Clause
"""``patch``, ``unpatch``, their options and report."""
