# SPDX-License-Identifier: BSD-3-Clause
"""The parts of every op: argument checks, backends, fakes, autograd, vmap."""
