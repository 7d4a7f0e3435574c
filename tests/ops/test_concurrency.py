# SPDX-License-Identifier: BSD-3-Clause
"""Several threads and streams at a time, with and without a CUDA graph being captured."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import liger
from liger._core.runtime import load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not load.CUDA_LOADED, reason="needs the compiled kernels")]


def in_threads(*functions):
    """Runs them at the same time; raises what the first of them that failed has raised."""
    errors = []

    def run(function):
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_with_other_hidden_sizes():
    """How much shared memory a kernel may have is no property of a launch: one thread must not take it from
    another."""
    until = time.monotonic() + 4

    def work(backward, forward, hidden):
        x = torch.randn(64, hidden, device="cuda").bfloat16()
        weight = torch.ones(hidden, device="cuda").bfloat16()
        statistics = forward(x, weight)
        while time.monotonic() < until:
            backward(x, weight, *statistics)

    def rms_backward(x, w, rstd):
        torch.ops.liger.rms_norm_backward(x, x, w, rstd, 0.0, "llama", True, True)

    def layer_backward(x, w, mean, rstd):
        torch.ops.liger.layer_norm_backward(x, x, w, w, mean, rstd, True, True, True)

    ops = [
        (rms_backward, lambda x, w: torch.ops.liger.rms_norm(x, w)[1:]),
        (layer_backward, lambda x, w: torch.ops.liger.layer_norm(x, w, w)[1:]),
    ]
    with liger.use_backend("cuda"):
        in_threads(*(lambda op=op, h=h: work(*op, h) for op in ops for h in (8192, 6144, 5120, 7168)))
        torch.cuda.synchronize()


@pytest.fixture
def head():
    """A call of fused_linear_ce, with a weight that does not begin at a multiple of 16 bytes; and its
    results."""
    memory = torch.randn(32000 * 1024 + 1, device="cuda").bfloat16()
    weight = memory[1:].view(32000, 1024).mul_(0.03)
    x = torch.randn(2048, 1024, device="cuda").bfloat16()
    target = torch.randint(32000, (2048,), device="cuda")
    target[::3] = -100

    def call():
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = liger.fused_linear_ce(*leaves, target)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    with liger.use_backend("cuda"):
        results = call()
        torch.cuda.synchronize()
        yield call, results


def same(results, expected):
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_streams_do_not_share_scratch(head):
    call, expected = head
    results = []
    for stream in [torch.cuda.Stream() for _ in range(3)] * 3:
        with torch.cuda.stream(stream):
            results.append(call())
    torch.cuda.synchronize()
    assert all(same(r, expected) for r in results)


def test_threads_do_not_share_scratch(head):
    call, expected = head
    found = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(4):
                results = call()
                torch.cuda.current_stream().synchronize()
                found.append(same(results, expected))

    in_threads(*[work] * 4)
    assert found == [True] * 16


# --- CUDA graphs: in processes of their own, where nothing has run before -----------------------------------


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CAPTURE = """
    import threading, torch, liger

    liger.set_backend("cuda")
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.float16, requires_grad=True)
    w = torch.randn(50000, 1024, device="cuda", dtype=torch.float16, requires_grad=True)
    y = torch.randint(50000, (2048,), device="cuda")
    y[:1000] = -100
    n, z = torch.randn(64, 4096, device="cuda"), torch.randn(8, 40000, device="cuda")
    liger.rms_norm(n)
    torch.cuda.synchronize()
    ready, capturing, done, errors = threading.Event(), threading.Event(), threading.Event(), []

    def other(warm):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                if warm:
                    # Memory for this stream and a handle of cuBLAS for this thread are torch's to get.
                    sizes = [1 << 31] + [1 << 19] * 8
                    memory = [torch.empty(n, device="cuda", dtype=torch.uint8) for n in sizes]
                    torch.mm(x.detach(), w.detach()[:1024])
                    del memory
                    torch.cuda.current_stream().synchronize()
                ready.set()
                capturing.wait()
                with torch.no_grad():
                    liger.fused_linear_ce(x, w, y)
                liger.softmax(z)
                liger.layer_norm(n)
        except Exception as error:
            errors.append(error)
        ready.set()
        done.set()

    def capture(graph):
        for _ in range(20):
            out = liger.rms_norm(n)
        capturing.set()
        done.wait()
        return out

    def check(graph, out):
        assert not errors, errors
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, liger.rms_norm(n))
"""


def test_first_calls_do_not_end_the_capture_of_another_thread():
    """In the global mode, torch's default, in which waiting and allocating in any thread would."""
    run(
        CAPTURE
        + """
    thread = threading.Thread(target=other, args=(True,))
    thread.start()
    ready.wait()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # torch.cuda.graph() would give back the memory that the other thread has got.
        graph.capture_begin(capture_error_mode="global")
        out = capture(graph)
        graph.capture_end()
    thread.join()
    check(graph, out)
    """
    )


def test_a_capture_of_one_thread_alone():
    """What docs/guides/cuda_graphs.md says of other threads: with this mode they may do whatever they
    like."""
    run(
        CAPTURE
        + """
    thread = threading.Thread(target=other, args=(False,))
    thread.start()
    ready.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = capture(graph)
    thread.join()
    check(graph, out)
    """
    )


def test_a_replayed_graph_equals_eager_code():
    """Whatever is computed anew: which rows are ignored, none or all of them."""
    x = torch.randn(512, 1024, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(32000, 1024, device="cuda") * 0.03).bfloat16().requires_grad_()
    target = torch.randint(32000, (512,), device="cuda")

    def step():
        loss = liger.fused_linear_ce(liger.rms_norm(x), weight, target)
        return loss, *torch.autograd.grad(loss, (x, weight))

    with liger.use_backend("cuda"):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for ignored in (0, 256, 512):
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                target.copy_(torch.randint_like(target, 32000))
                target[:ignored] = -100
            graph.replay()
            torch.cuda.synchronize()
            for a, b in zip(captured, step(), strict=True):
                scale = b.float().nan_to_num().abs().max().item()
                torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * scale, equal_nan=True)


# --- errors of others ---------------------------------------------------------------------------------------


def test_a_failed_launch_leaves_no_error_for_the_next_op():
    out = run(
        """
    import torch, liger

    liger.set_backend("cuda")
    x = torch.randn(4, 150000, device="cuda")
    expected = liger.softmax(x), liger.relu_squared(x)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            torch.cuda.synchronize()  # not allowed here: the capture is over
        except RuntimeError:
            pass
        try:
            liger.softmax(x)
        except RuntimeError as error:
            print("refused:", error)
        try:
            graph.capture_end()
        except RuntimeError:
            pass
    assert torch.equal(liger.relu_squared(x), expected[1])
    assert torch.equal(liger.softmax(x), expected[0])
    """
    )
    assert "refused:" in out


def test_an_earlier_kernel_that_failed_is_named_as_such():
    out = run(
        """
    import os, torch, liger

    liger.set_backend("cuda")
    x = torch.randn(8, 16, device="cuda")
    liger.relu_squared(x)  # so that there is memory for its result
    torch.zeros(4, device="cuda")[torch.full((1,), 9, device="cuda")]
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        pass
    try:
        liger.relu_squared(x)
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
    os._exit(0)  # without a context nothing can be torn down
    """
    )
    assert "relu_squared found that an earlier kernel of this process had failed: cudaErrorAssert" in out
