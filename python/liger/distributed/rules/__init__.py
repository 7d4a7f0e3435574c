# SPDX-License-Identifier: BSD-3-Clause
"""DTensor rules of every op."""
