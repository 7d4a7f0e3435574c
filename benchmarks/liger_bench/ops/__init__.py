# SPDX-License-Identifier: BSD-3-Clause
"""One module per row of the suite, ``rows(options)``, and what two of them share."""
