# SPDX-License-Identifier: BSD-3-Clause
"""Every public callable from many threads at once: all in the same order, and each in an order of its own."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from public_callables import CASES, arguments, differentiable_outputs, weighted_sum

THREADS = 4


@pytest.fixture(autouse=True)
def _frequent_switches():
    """Threads change places after a microsecond, not 5 ms, so that one run shows a race."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _results(name, given):
    """Results and gradients. Every call has leaves of its own: gradients of shared ones would meet."""
    keys = CASES[name].differentiable
    given = given | {key: given[key].detach().requires_grad_() for key in keys}
    results = differentiable_outputs(name, given)
    grads = torch.autograd.grad(weighted_sum(results), [given[key] for key in keys])
    return [r.detach() for r in results] + list(grads)


@pytest.mark.parametrize("order", ["same", "own"])
def test_threads_agree_with_one(device, order):
    problems = {name: arguments(name, device, requires_grad=False) for name in CASES}
    expected = {name: _results(name, given) for name, given in problems.items()}
    barrier = threading.Barrier(THREADS)

    def work(seed):
        names = list(problems)
        if order == "own":
            random.Random(seed).shuffle(names)
        barrier.wait()
        return {name: _results(name, problems[name]) for name in names}

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(work, range(THREADS)):
            for name, results in found.items():
                for actual, wanted in zip(results, expected[name], strict=True):
                    torch.testing.assert_close(
                        actual, wanted, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
                    )


def test_grad_mode_and_backwards_of_other_threads(device):
    """Half of the threads record, with and without create_graph; the others must record nothing."""
    problems = {name: arguments(name, device) for name in CASES}
    barrier = threading.Barrier(THREADS)

    def work(seed):
        names = list(problems)
        random.Random(seed).shuffle(names)
        barrier.wait()
        for name in names:
            given = problems[name]
            if seed % 2:
                with torch.no_grad():
                    assert not differentiable_outputs(name, given), name
            else:
                keys = CASES[name].differentiable
                own = given | {key: given[key].detach().requires_grad_() for key in keys}
                total = weighted_sum(differentiable_outputs(name, own))
                torch.autograd.grad(total, [own[key] for key in keys], create_graph=seed % 4 == 0)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
