# SPDX-License-Identifier: BSD-3-Clause
"""cross_entropy of rows and batches of every size, also those at which the cuda backend changes its
kernel."""

import pytest
import torch
from cases import DTYPES, ignored_in_patterns, padded
from cross_entropy_reference import options, random_logits, reference

import liger


@pytest.mark.parametrize("vocab", [50257, 140001, 1000003])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_of_every_alignment(device, vocab, inplace, dtype):
    """Longer than a block's shared memory, and than a cluster's; every row lies differently to 16 bytes."""
    logits, target = random_logits(4, vocab, device, dtype)
    target[1] = -100
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    output = liger.cross_entropy(leaf * 1, target, inplace=inplace, metrics=("argmax",))
    output.loss.backward()
    expected = reference(exact, target)
    expected["loss"].backward()
    torch.testing.assert_close(output.loss.double(), expected["loss"], rtol=1e-6, atol=0)
    assert torch.equal(output.argmax, expected["argmax"])
    assert not leaf.grad[1].any()
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=epsilon + 1e-5, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_two_to_the_31_logits(device, inplace):
    rows, vocab, last = 17000, 128256, 5
    assert rows * vocab > 1 << 31
    if torch.cuda.mem_get_info()[0] < 5 * rows * vocab * 2:
        pytest.skip("needs 22 GB of free GPU memory")
    logits = torch.randn(rows, vocab, device=device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=device)
    tail = logits[-last:].detach().clone().requires_grad_()
    output = liger.cross_entropy(logits * 1, target, reduction="sum", inplace=inplace, metrics=("argmax",))
    output.loss.backward()
    expected = liger.cross_entropy(tail, target[-last:], reduction="sum", metrics=("argmax",))
    expected.loss.backward()
    assert torch.equal(output.argmax[-last:], expected.argmax)
    torch.testing.assert_close(logits.grad[-last:], tail.grad, rtol=1e-2, atol=1e-6)
    per_row = liger.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(per_row[-last:].sum(), expected.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(per_row.sum(), output.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("need_grad", [False, True])
@pytest.mark.parametrize("rows, vocab", [(1, 24), (8, 256), (256, 24), (257, 24), (9, 20000), (300, 20000)])
def test_the_denominator_of_few_and_many_rows(device, rows, vocab, need_grad):
    """The same bits as with the number of valid rows as the denominator."""
    logits, target = random_logits(rows, vocab, device, torch.bfloat16)
    target[::3] = -100
    valid = (target >= 0).sum().float()

    def call(reduction, denominator=None):
        options = -100, 0.0, 0.0, None, reduction, *5 * [False], need_grad
        return torch.ops.liger.cross_entropy_forward(logits, target, None, None, denominator, *options)

    results = call("mean")
    assert results[7] == valid and call("sum")[7] == call("none")[7] == 1
    for found, expected in zip(results, call("sum", valid), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# --- the kernels of the cuda backend, row by row, straight from the op --------------------------------------


OPTIONAL = {
    "ce_weight": None, "token_weight": None, "denominator": None, "ignore_index": -100, "label_smoothing": 0.0,
    "lse_square_scale": 0.0, "softcap": None,
}  # fmt: skip


def per_row(logits, target, inplace, wanted, **chosen):
    """(losses, argmax, entropy, gradient) of the op that makes the gradient in its forward."""
    options = [chosen.get(name, default) for name, default in OPTIONAL.items()]
    if inplace:
        results = torch.ops.liger.cross_entropy_forward_(logits, target, *options, "none", *5 * [wanted])
    else:
        results = torch.ops.liger.cross_entropy_forward(logits, target, *options, "none", *5 * [wanted], True)
    return results[0], results[3], results[5], logits if inplace else results[-1]


def check_rows(values, target, layout, inplace, **chosen):
    """Losses, metrics and gradients against float64, with the metrics and without."""
    exact = values.double().requires_grad_()
    expected = reference(exact, target, **chosen, reduction="none")
    expected["loss"].sum().backward()
    epsilon = torch.finfo(values.dtype).eps
    smallest = 1e-7 if values.dtype == torch.float16 else 1e-9
    for wanted in (False, True):
        logits = layout(values.clone())
        loss, predicted, entropy, gradient = per_row(logits, target, inplace, wanted, **chosen)
        torch.testing.assert_close(loss.double(), expected["loss"], rtol=1e-5, atol=1e-5)
        if wanted:
            assert torch.equal(predicted, expected["argmax"])
            torch.testing.assert_close(entropy.double(), expected["entropy"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), exact.grad, rtol=epsilon + 2e-5, atol=smallest)
        assert inplace or torch.equal(logits, values)


# The bytes of a row at which the cuda backend changes its kernel or the shape of its launch, with 228 KB of
# shared memory per SM: shared memory without and with extras, four blocks per SM, alone, in pairs and in the
# largest clusters, three with extras, alone and in the largest clusters, and one.
LIMITS = [16384, 32768, 56960, 113792, 452096, 76160, 602112, 1835008]


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", LIMITS)
def test_where_the_kernel_changes(gpu, limit, dtype, name, inplace):
    at = limit // dtype.itemsize
    for vocab, layout in ((at - 1, padded), (at, torch.clone), (at + 1, torch.clone), (at + 13, padded)):
        chosen = options(name, 3, vocab, gpu)
        chosen.pop("reduction")
        check_rows(
            *random_logits(3, vocab, gpu, dtype, chosen.get("ignore_index", -100)), layout, inplace, **chosen
        )


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [torch.clone, padded])
@pytest.mark.parametrize(
    "row_bytes, blocks", [(131082, 198), (200012, 132), (256518, 66), (513012, 50), (950012, 24)]
)
def test_more_rows_than_blocks(gpu, row_bytes, blocks, layout, dtype, name, inplace):
    """Each block takes several rows, which follow computed and ignored ones."""
    rows, vocab = 3 * blocks + 5, row_bytes // dtype.itemsize
    chosen = options(name, rows, vocab, gpu)
    chosen.pop("reduction")
    ignore_index = chosen.get("ignore_index", -100)
    logits, target = random_logits(rows, vocab, gpu, dtype, ignore_index)
    check_rows(logits, ignored_in_patterns(target, ignore_index, blocks), layout, inplace, **chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [60003, 70003, 90003, 128259, 256003])
def test_rows_do_not_depend_on_their_batch(gpu, vocab):
    """A row has the same bits in every place of a batch, and in every repetition."""
    logits, target = random_logits(280, vocab, gpu, torch.bfloat16)
    place = torch.arange(280, device=gpu).roll(80)
    whole = per_row(logits, target, False, False)
    moved = per_row(logits[place], target[place], False, False)
    # By multiples of 8 rows, so that each lies alike to 16 bytes and is cut alike.
    assert torch.equal(moved[0], whole[0][place]) and torch.equal(moved[-1], whole[-1][place])
    for _ in range(3):
        again = per_row(logits, target, False, False)
        assert torch.equal(again[0], whole[0]) and torch.equal(again[-1], whole[-1])


@pytest.mark.gpu
def test_cuda_graph_of_rows_in_clusters(gpu):
    logits, target = random_logits(150, 128259, gpu, torch.bfloat16)
    first = per_row(logits, target, False, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = per_row(logits, target, False, False)
    logits.copy_(logits.flip(0))
    target.copy_(target.flip(0))
    graph.replay()
    replayed = [captured[0].clone(), captured[-1].clone()]
    again = per_row(logits, target, False, False)
    assert torch.equal(replayed[0], again[0]) and torch.equal(replayed[1], again[-1])
    assert not torch.equal(replayed[0], first[0])
