# SPDX-License-Identifier: BSD-3-Clause
"""The first imports of ``import liger``: compiled libraries, environment variables, optional packages."""
