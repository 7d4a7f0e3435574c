# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities of target tokens under a linear layer."""
