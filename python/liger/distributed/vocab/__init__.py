# SPDX-License-Identifier: BSD-3-Clause
"""Losses of a vocabulary that is sharded over the processes of a group."""
