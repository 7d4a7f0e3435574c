# SPDX-License-Identifier: BSD-3-Clause
"""Gated MLPs, activations and experts."""
