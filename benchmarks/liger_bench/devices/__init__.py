# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks on several devices, and their processes."""
