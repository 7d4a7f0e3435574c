# SPDX-License-Identifier: BSD-3-Clause
"""Makes pytest put the repository's root on sys.path instead of this folder, in which trl/ and transformers/
are not the packages of these names."""
