# SPDX-License-Identifier: BSD-3-Clause
"""Modules that a training framework loads by its own plugin interface (docs/integrations.md). Each imports its
framework, so nothing of liger imports them."""
