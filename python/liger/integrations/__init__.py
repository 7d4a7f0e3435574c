# SPDX-License-Identifier: BSD-3-Clause
"""Modules that training frameworks load by their own plugin interfaces (docs/guides/integrations.md).

Each imports its framework, so nothing of liger imports them.
"""
