# SPDX-License-Identifier: BSD-3-Clause
"""The ops, each a module or a folder: torch kernels, fakes, autograd formula and public function.

``op.py`` of a folder has the public function, ``rows.py`` the torch kernels over rows, ``chunks.py`` the loop
over chunks of an lm_head's logits. Code that several ops share is in :mod:`liger._core`.
"""
