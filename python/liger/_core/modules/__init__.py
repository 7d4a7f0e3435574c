# SPDX-License-Identifier: BSD-3-Clause
"""Questions about modules: plain linear layers, hooks, quantised weights."""
