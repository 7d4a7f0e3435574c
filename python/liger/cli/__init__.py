# SPDX-License-Identifier: BSD-3-Clause
"""The commands of ``liger``: a module per command with ``run(arguments)``, which returns the exit code.

The arguments and their help are in ``liger_cli``, which does not import torch.
"""
