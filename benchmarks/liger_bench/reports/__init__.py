# SPDX-License-Identifier: BSD-3-Clause
"""From measured rows to verdicts, tables and pictures."""
