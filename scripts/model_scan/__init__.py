# SPDX-License-Identifier: BSD-3-Clause
"""Every model type of the installed transformers, tiny and random, compared with a patched copy:
``make models``."""
