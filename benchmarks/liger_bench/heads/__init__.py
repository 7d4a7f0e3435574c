# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the benchmarks of lm_heads."""
