# SPDX-License-Identifier: BSD-3-Clause
"""The tools of every patched part: patched classes, trials, renamed functions, memory that is reused."""
