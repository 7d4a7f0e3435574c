# SPDX-License-Identifier: BSD-3-Clause
"""The grouped GEMMs of grouped_experts on compute capability 9.0: first their errors, then their times.

    PYTHONPATH=benchmarks timeout 120 python -m liger_bench.expert_kernels --only-check --small
    PYTHONPATH=benchmarks python -m liger_bench.expert_kernels --json r.json

Errors: norms relative to float64, for skewed routings, vs. the errors of the default path.
Times: each kernel alone, in TFLOP/s, in turns with the grouped GEMM of QuACK for the same product if QuACK is
installed, and forward and backward of the op, in turns with the default path, for the shapes of
ops/experts.py. The run takes a few minutes. A call of the op whose error is too large ends the run with
status 1.
"""

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from unittest import mock

import torch

import liger
from liger._core.op.by_name import arguments_type
from liger.ops.grouped_experts import sm90
from liger.ops.grouped_experts.routing import Routing

from .environment import environment
from .harness import Options
from .measure import PROVIDER_ERRORS
from .ops.experts import GPT_OSS, SHAPES, _inputs, _ours, dense_work

NAMES = ("y", "grad_x", "grad_weights", "grad_gate_up_proj", "grad_down_proj")
# The largest ratio of an error to the error of the default path, which rounds gate, up and product, too, or
# of a float32 result that is rounded once.
ALLOWED = 1.5
ROUTINGS = {
    "distinct": lambda t, k, e: torch.rand(t, e).topk(min(k, e), -1).indices,
    "one expert": lambda t, k, e: torch.full((t, k), e - 1),
    "one token each": lambda t, k, e: torch.arange(t * k).view(t, k) % e,
    "skewed": lambda t, k, e: (torch.rand(t, k).pow(6) * e).long(),
    "sentinels": lambda t, k, e: torch.randint(2 * e, (t, k)),
}
# (tokens, choices, experts, hidden, intermediate)
CASES = [
    (40, 1, 3, 8, 8), (700, 2, 8, 136, 104), (33, 4, 128, 264, 200), (2048, 8, 128, 512, 192),
    (4096, 2, 3, 1024, 520), (64, 2, 1023, 64, 64),
]  # fmt: skip
SMALL = CASES[:3]
FORMS = {"silu": {}, "gpt_oss": GPT_OSS}


def reference(inputs, options, dtype):
    """y and the gradients in a wide dtype: a loop over experts."""
    x, index, weights, gate_up, down, grad_y = inputs
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weights, gate_up, down)]
    x, weights, gate_up, down = leaves
    y = torch.zeros_like(x)
    for e in range(down.shape[0]):
        token, choice = torch.where(index == e)
        first, second = (t[e] if options else t[e].t() for t in (gate_up, down))
        both = x[token] @ first
        if options:
            limit = options["limit"]
            gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
            product = gate * torch.sigmoid(options["alpha"] * gate) * (up + 1)
        else:
            gate, up = both.chunk(2, -1)
            product = torch.nn.functional.silu(gate) * up
        y = y.index_add(0, token, product @ second * weights[token, choice, None])
    return y.detach(), *torch.autograd.grad(y, leaves, grad_y.to(dtype))


PATHS = ("kernels", "default")


def on_path(path):
    """Within it all calls take this path."""
    if path == "kernels":
        return contextlib.nullcontext()
    return mock.patch.object(sm90, "unsupported", lambda a: "the default path is measured")


def results(inputs, options, path):
    x, index, weights, gate_up, down, grad_y = inputs
    leaves = [t.detach().requires_grad_() for t in (x, weights, gate_up, down)]
    with on_path(path):
        y = liger.grouped_experts(leaves[0], index, *leaves[1:], **options)
        return y.detach(), *torch.autograd.grad(y, leaves, grad_y)


def random_case(sizes, routing, form, dtype, device):
    tokens, choices, experts, hidden, intermediate = sizes
    index = ROUTINGS[routing](tokens, choices, experts).to(device)
    gate_up, down = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
    if FORMS[form]:
        gate_up, down = ((e, k, n) for e, n, k in (gate_up, down))
    x, grad_y = (torch.randn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
    matrices = [(torch.randn(s, device=device) / hidden**0.5).to(dtype) for s in (gate_up, down)]
    return x, index, torch.rand(index.shape, device=device), *matrices, grad_y


def relative(found, exact):
    error = (found.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    return error.item()


def require_kernels():
    """Without the kernels the default path would be compared with itself."""
    if not sm90.has_kernels(torch.empty(1, device="cuda")):
        raise RuntimeError("no kernels of the experts: LIGER_WGMMA is 0, or the build has none for 9.0a")


def run_small():
    """Each small case once, without a check of its values: for compute-sanitizer."""
    require_kernels()
    for sizes, routing, form, dtype in itertools.product(
        SMALL, ROUTINGS, FORMS, (torch.bfloat16, torch.float16)
    ):
        results(random_case(sizes, routing, form, dtype, "cuda"), FORMS[form], "kernels")


def errors_of(found, default, wide, exact):
    """{result: (error, error of the default path, error of a float32 result that is rounded once)}. Rounded
    to the dtype of y, also for weights in float32, whose gradients are sums of products in that dtype."""
    dtype = found[0].dtype
    return {
        name: (relative(f, e), relative(d, e), relative(w.to(dtype), e))
        for name, f, d, w, e in zip(NAMES, found, default, wide, exact, strict=True)
    }


def check(cases, device="cuda"):
    """Rows with the largest errors of each case; "wrong" names the results that are not finite or too far
    off, or differ between two runs."""
    records = []
    for sizes in cases:
        for routing in ROUTINGS:
            for form, options in FORMS.items():
                for dtype in (torch.bfloat16, torch.float16):
                    inputs = random_case(sizes, routing, form, dtype, device)
                    found, again, default = (
                        results(inputs, options, path) for path in ("kernels", "kernels", "default")
                    )
                    exact, wide = (reference(inputs, options, t) for t in (torch.float64, torch.float32))
                    errors = errors_of(found, default, wide, exact)
                    wrong = [name for name, (e, *bounds) in errors.items() if not e <= ALLOWED * max(bounds)]
                    same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
                    records.append(
                        {
                            "sizes": sizes, "routing": routing, "form": form, "dtype": str(dtype),
                            "errors": errors, "wrong": wrong + ([] if same else ["bits"]),
                        }
                    )  # fmt: skip
    return records


def milliseconds(works, rounds, iterations):
    """{name: median ms of a call}: the works in turns."""
    times = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(iterations):
                work()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / iterations)
    return {name: statistics.median(values) for name, values in times.items()}


def kernel_works(shape, inputs):
    """{kernel: (call, FLOPs)}."""
    t, options = inputs, GPT_OSS if shape.is_gpt_oss else {}
    forward = torch.ops.liger.grouped_experts_forward.default
    given = (
        options.get("activation", "silu"), bool(options), bool(options), options.get("alpha", 1.702),
        options.get("limit"),
    )  # fmt: skip
    biases = t.get("gate_up_proj_bias"), t.get("down_proj_bias")
    a = arguments_type(forward)(
        t["x"], t["index"], t["weights"], t["gate_up_proj"], t["down_proj"], *biases, *given, True
    )
    routing = Routing(t["index"], shape.experts, t["weights"])
    weights = routing.weights
    x, grad_y = (sm90.source(t[name], routing, a) for name in ("x", "grad_y"))
    product, kept = sm90.gate_up(x, routing, a, True)
    rows = sm90.rows(product, routing, t["down_proj"], a.is_transposed, biases[1], weights)
    # The kernel writes the gradient over it, which shrinks call by call; other kernels read the first.
    spent = kept.clone()
    gemm = 2 * t["index"].numel() * shape.hidden * shape.intermediate
    transposed = a.is_transposed
    return {
        "sort": (lambda: Routing(t["index"], shape.experts, t["weights"]), 0),
        "gather": (lambda: sm90.source(t["x"], routing, a), 0),
        "gate_up": (lambda: sm90.gate_up(x, routing, a, True), 2 * gemm),
        "down": (
            lambda: sm90.rows(product, routing, t["down_proj"], transposed, biases[1], weights), gemm
        ),
        "sum": (lambda: sm90.sum_choices(rows, routing), 0),
        "grad_product": (lambda: sm90.grad_product_(grad_y, routing, a, weights, spent), gemm),
        "grad_x": (lambda: sm90.rows(kept, routing, t["gate_up_proj"], not transposed), 2 * gemm),
        "grad_down": (lambda: sm90.grad_matrix(grad_y, product, routing, transposed), gemm),
        "grad_gate_up": (lambda: sm90.grad_matrix(x, kept, routing, not transposed), 2 * gemm),
    }  # fmt: skip


QUACK = ", quack"


def quack_works(shape, inputs):
    """{kernel, quack: (call, FLOPs)}: QuACK's grouped GEMMs with gathers and epilogues, without autotuning.
    Empty for gpt-oss, whose clamps QuACK lacks, and without QuACK."""
    if shape.is_gpt_oss or importlib.util.find_spec("quack") is None:
        return {}
    interface = importlib.import_module("quack.gemm_interface")
    t, slots = inputs, inputs["index"].numel()
    hidden, inner, experts = shape.hidden, shape.intermediate, shape.experts
    routing = Routing(t["index"], experts, t["weights"])
    tokens = routing.tokens[:slots].int()
    ends = torch.cat((routing.ends.new_zeros(1), routing.ends)).int()
    first = t["gate_up_proj"].unflatten(1, (2, inner)).transpose(1, 2).flatten(1, 2).contiguous()
    down, x, grad_y = t["down_proj"], t["x"], t["grad_y"]
    gate_up, rows = x.new_empty(slots, 2 * inner), x.new_empty(slots, hidden)
    product, grad_gate_up = x.new_empty(slots, inner), torch.empty_like(gate_up)
    weighted = torch.empty_like(product)
    weights = routing.weights[:slots, 0].contiguous()
    of_first, of_down = x.new_empty(experts, hidden, 2 * inner), torch.empty_like(down)
    gather = {"A_idx": tokens, "tuned": False}
    gemm = 2 * slots * hidden * inner
    works = {
        "gate_up": (
            lambda: interface.gemm_gated_out(x, first.mT, gate_up, product, cu_seqlens_m=ends, **gather), 2 * gemm
        ),
        "down": (lambda: interface.gemm(product, down.mT, out=rows, cu_seqlens_m=ends, tuned=False), gemm),
        "grad_product": (
            lambda: interface.gemm_dgated_out(
                grad_y, down, gate_up, grad_gate_up, weighted, colvec_scale=weights, colvec_reduce=True,
                cu_seqlens_m=ends, **gather,
            ),
            gemm,
        ),
        "grad_x": (
            lambda: interface.gemm(grad_gate_up, first, out=rows, cu_seqlens_m=ends, tuned=False), 2 * gemm
        ),
        "grad_down": (lambda: interface.gemm(grad_y.mT, weighted, out=of_down, cu_seqlens_k=ends, **gather), gemm),
        "grad_gate_up": (
            lambda: interface.gemm(x.mT, grad_gate_up, out=of_first, cu_seqlens_k=ends, **gather), 2 * gemm
        ),
    }  # fmt: skip
    return {name + QUACK: work for name, work in works.items()}


def working(works):
    """The works whose first call raises no error; the errors of others are printed."""
    kept = {}
    for name, (work, flops) in works.items():
        try:
            work()
        except PROVIDER_ERRORS as error:
            print(f"{name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        else:
            kept[name] = work, flops
    return kept


def op_works(shape, inputs):
    names = ("x", "weights", *shape.parameters)
    leaves = inputs | {name: inputs[name].detach().requires_grad_() for name in names}

    def step(path):
        with on_path(path):
            y = _ours(shape, False, leaves)
            torch.autograd.grad(y, [leaves[name] for name in names], inputs["grad_y"])

    def forward(path):
        with on_path(path), torch.no_grad():
            _ours(shape, False, inputs)

    return {
        f"{work.__name__}, {path}": lambda work=work, path=path: work(path)
        for work in (forward, step)
        for path in PATHS
    }


def measure(shape, tokens, options, rounds=5, iterations=5):
    inputs = _inputs(options, shape, tokens)()
    works = kernel_works(shape, inputs) | working(quack_works(shape, inputs))
    kernels = milliseconds({name: work for name, (work, _) in works.items()}, rounds, iterations)
    ops = op_works(shape, inputs)
    ops["step, dense GEMMs"] = dense_work(shape, inputs["index"].numel(), inputs["x"])
    times = milliseconds(ops, rounds, 1 if options.size == "self-test" else iterations)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "kernels": {name: {"ms": ms, "tflops": works[name][1] / ms / 1e9} for name, ms in kernels.items()},
        "op ms": times,
    }


def text_of(record):
    lines = [f"{record['shape']}, {record['tokens']} tokens"]
    for name, found in record["kernels"].items():
        lines.append(f"  {name:20} {found['ms']:8.3f} ms {found['tflops']:7.0f} TFLOP/s")
    return "\n".join([*lines, *(f"  {name:20} {ms:8.3f} ms" for name, ms in record["op ms"].items())])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only-check", action="store_true")
    only.add_argument("--only-times", action="store_true")
    parser.add_argument("--small", action="store_true", help="the small cases, as for compute-sanitizer")
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192])
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("liger_bench.expert_kernels: needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    require_kernels()
    options = Options()
    checks = [] if given.only_times else check(SMALL if given.small else CASES)
    wrong = [record for record in checks if record["wrong"]]
    for record in wrong:
        print(record)
    if checks:
        errors = [e for record in checks for e in record["errors"].values()]
        of_default, of_rounding = (
            max(e[0] / e[at] for e in errors if e[at] > 0 and math.isfinite(e[0])) for at in (1, 2)
        )
        print(
            f"{len(checks)} cases, {len(wrong)} wrong; largest error {of_default:.2f} x the error of the default "
            f"path, {of_rounding:.2f} x the error of float32 that is rounded once"
        )
    records = []
    if not given.only_check:
        for shape in SHAPES:
            for tokens in given.tokens if shape.name in given.shapes else ():
                records.append(measure(shape, tokens, options))
                print(text_of(records[-1]), flush=True)
                torch.cuda.empty_cache()
    if given.json is not None:
        text = json.dumps({"environment": environment(options), "checks": checks, "rows": records}, indent=1)
        given.json.write_text(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
