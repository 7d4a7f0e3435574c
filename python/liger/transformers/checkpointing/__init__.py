# SPDX-License-Identifier: BSD-3-Clause
"""``checkpoint``: which decoder layers recompute, by measured memory."""
