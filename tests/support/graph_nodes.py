# SPDX-License-Identifier: BSD-3-Clause
"""The nodes of an autograd graph."""

from collections import Counter


def count_nodes(output):
    """How many nodes of each name are behind a tensor."""
    found, waiting = {}, [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            waiting += [following for following, _ in node.next_functions]
    return Counter(found.values())
