# SPDX-License-Identifier: BSD-3-Clause
"""Runs every compiled op with small inputs under compute-sanitizer: memcheck and synccheck, or the given
tools.

    python scripts/sanitize.py [tools] [--each] [--work NAME ...]

A NAME is an op of torch.ops.liger or a key of SIZES. --work runs the given names only; without tools, it runs
them in this process, not under compute-sanitizer. --each runs every name in a separate process, several at a
time, and lists those with an error. tests/support/samples/samples.py has the arguments of the ops; SIZES has
larger inputs for kernels that the samples do not reach. Only kernels of liger are checked. Exit code: 1 if a
tool reports an error, 2 if it cannot run.
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# racecheck is not a default: on compute capability 9.0 it cannot run half-precision GEMMs of cuBLAS. The
# process ends with an illegal memory access and "failed to handle a hardware exception", even without any
# kernel of liger. With --each only "linear sizes" fails for this reason.
DEFAULT_TOOLS = ("memcheck", "synccheck")
TOOLS = (*DEFAULT_TOOLS, "racecheck")
# Timeout of one tool in seconds, far above its usual time: detects kernels that do not terminate.
LIMIT = 600
# Concurrent processes with --each.
MAX_PROCESSES = 6


# --- the work that is checked -------------------------------------------------------------------------------


def run_samples(op):
    """The samples of one op of torch.ops.liger."""
    import torch
    from samples import SAMPLES

    with torch.no_grad():
        for arguments in SAMPLES[op](torch.device("cuda")):
            getattr(torch.ops.liger, op)(*arguments)


def run(function, *inputs, **fixed):
    """A public function, forward and backward."""
    import torch

    leaves = [t.requires_grad_() for t in inputs]
    outputs = function(*leaves, **fixed)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad([o.sum() for o in outputs], leaves)


def tensors(dtype, *shapes):
    import torch

    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def classes(rows, vocab):
    import torch

    target = torch.randint(vocab, (rows,), device="cuda")
    target[::3] = -100
    return target


def run_row_lengths(function, weights=0, **fixed):
    """A row-wise function with rows of all lengths that have different kernels."""
    import torch

    for dtype in (torch.bfloat16, torch.float32):
        for columns in (64, 1000, 4096, 9001, 40000, 131072):
            run(function, *tensors(dtype, (3, columns), *[(columns,)] * weights), **fixed)


def cross_entropy_sizes():
    import torch

    import liger

    for dtype in (torch.bfloat16, torch.float32):
        for columns in (64, 1000, 4096, 9001, 40000, 131072):
            target = classes(3, columns)
            for fixed in ({}, {"label_smoothing": 0.1, "softcap": 9.0}):
                run(liger.cross_entropy, *tensors(dtype, (3, columns)), target=target, **fixed)


def divergence_sizes():
    import torch

    import liger

    for function in (liger.kl_div, liger.jsd, liger.tvd):
        for dtype in (torch.bfloat16, torch.float32):
            for columns in (64, 1000, 4096, 9001, 40000, 131072):
                x, teacher = tensors(dtype, (3, columns), (3, columns))
                run(function, x, teacher=teacher)


def group_norm_sizes():
    import torch

    import liger

    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((2, 32, 9), (2, 32, 32, 32), (1, 64, 96, 96), (1, 32, 256, 256)):
            x, weight, bias = tensors(dtype, shape, shape[1:2], shape[1:2])
            run(lambda x, weight, bias: liger.group_norm(x, 32, weight, bias), x, weight, bias)


def gated_norm_sizes():
    import torch

    import liger

    for dtype in (torch.bfloat16, torch.float32):
        for columns, group_size in (
            (64, None),
            (128, 16),
            (1000, 125),
            (4096, 1024),
            (9001, None),
            (131072, 65536),
        ):
            x, gate, weight = tensors(dtype, (3, columns), (3, columns), (columns,))
            for first in (True, False):
                run(liger.rms_norm_gated, x, gate, weight, group_size=group_size, norm_before_gate=first)


def qk_norm_rope_sizes():
    import torch

    import liger

    for dtype in (torch.bfloat16, torch.float32):
        for dim, rotary in ((128, 128), (256, 64), (72, 32), (33, 20), (1024, 1024)):
            q, k, v, w = tensors(dtype, (2, 5, 70, dim), (2, 3, 70, dim), (dim,), (dim,))
            cos, sin = torch.rand(2, 70, rotary, device="cuda", dtype=dtype)
            for interleaved in (False, True):
                run(liger.qk_norm_rope, q, k, v, w, cos=cos, sin=sin, interleaved=interleaved)


def linear_sizes():
    import torch

    import liger

    for dtype in (torch.bfloat16, torch.float32):
        run(liger.fused_linear_ce, *tensors(dtype, (300, 128), (1000, 128)), target=classes(300, 1000))


def sm90_sizes():
    """The GEMMs of the wgmma engine, if the build has them."""
    import torch

    import liger

    # The second one has a partial k-block and a narrow last tile, the third one tiles of 320 and 224 columns.
    for dtype, hidden, vocab in (
        (torch.bfloat16, 256, 2048),
        (torch.bfloat16, 784, 2120),
        (torch.bfloat16, 640, 2048),
        (torch.float16, 256, 2048),
    ):
        x, weight = tensors(dtype, (600, hidden), (vocab, hidden))
        target = classes(600, vocab)
        run(liger.fused_linear_ce, x, weight, target=target)
        run(liger.fused_linear_ce, x, weight, target=target, memory_budget=1 << 20)
        for recompute in (False, True):
            run(liger.fused_linear_logprobs, x, weight, target=target, temperature=0.7, recompute=recompute)

            def with_entropy(x, weight, recompute=recompute, target=target):
                found = liger.fused_linear_logprobs(
                    x, weight, target, memory_budget=1 << 20, metrics=("entropy",), recompute=recompute
                )
                return found[:2]

            run(with_entropy, x, weight)


def sm90_terms():
    """Partial tiles, a bias, a softcap and label smoothing on the wgmma engine, if the build has it."""
    import torch

    import liger

    # The last k-block is partial with the second hidden size.
    for hidden in (320, 1488):
        x, weight, bias = tensors(torch.bfloat16, (600, hidden), (1153, hidden), (1153,))
        target = classes(600, 1153)
        for budget in (512 << 20, 1 << 20):
            for options in ({}, {"softcap": 5.0}, {"label_smoothing": 0.1}):
                run(liger.fused_linear_ce, x, weight, target=target, memory_budget=budget, **options)

                def with_bias(x, weight, bias, target=target, budget=budget, options=options):
                    return liger.fused_linear_ce(x, weight, target, bias, memory_budget=budget, **options)

                run(with_bias, x, weight, bias)

        def with_metrics(x, weight, target=target):
            found = liger.fused_linear_logprobs(
                x, weight, target, metrics=("entropy", "argmax", "log_sum_sq_probs")
            )
            return found.logprobs, found.entropy

        run(with_metrics, x, weight)


def sm90_shards():
    """Vocabulary-parallel losses and log-probabilities in a group of one process."""
    import torch
    import torch.distributed as dist

    import liger

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    x, weight = tensors(torch.bfloat16, (600, 256), (2048, 256))
    target = classes(600, 2048)
    # The first budget keeps the exponentials for the backward, the second one computes them again in chunks.
    for budget in (512 << 20, 1 << 20):
        shard = {"target": target, "memory_budget": budget, "vocab_size": 2048}
        run(liger.fused_linear_ce, x, weight, **shard)
        for entropy in (False, True):

            def logprobs(x, weight, shard=shard, entropy=entropy):
                metrics = ("entropy",) if entropy else ()
                found = liger.fused_linear_logprobs(x, weight, **shard, temperature=0.7, metrics=metrics)
                return found[:2] if entropy else found

            run(logprobs, x, weight)
    dist.destroy_process_group()


def sm90_experts():
    """The grouped GEMMs of the experts."""
    sys.path.append(str(ROOT / "benchmarks"))
    from liger_bench import expert_kernels

    expert_kernels.run_small()


def public(name, weights=0):
    def work():
        import liger

        run_row_lengths(getattr(liger, name), weights)

    return work


SIZES = {
    "softmax sizes": public("softmax"),
    "rms_norm sizes": public("rms_norm", 1),
    "rms_norm_gated sizes": gated_norm_sizes,
    "layer_norm sizes": public("layer_norm", 2),
    "group_norm sizes": group_norm_sizes,
    "qk_norm_rope sizes": qk_norm_rope_sizes,
    "cross_entropy sizes": cross_entropy_sizes,
    "divergence sizes": divergence_sizes,
    "linear sizes": linear_sizes,
    "sm90 sizes": sm90_sizes,
    "sm90 terms": sm90_terms,
    "sm90 shards": sm90_shards,
    "sm90 experts": sm90_experts,
}


def names():
    """All ops with compiled kernels, and the keys of SIZES."""
    from liger._core.op.registration import FAMILIES

    return [*(op for family in FAMILIES.values() for op in family.torch_kernels), *SIZES]


def work(chosen):
    sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/support/samples")]
    import torch

    import liger

    liger.set_backend("cuda")
    torch.manual_seed(0)
    chosen = chosen or names()
    for name in chosen:
        SIZES[name]() if name in SIZES else run_samples(name)
    torch.cuda.synchronize()
    print(f"ran: {len(chosen)}")


# --- the tools ----------------------------------------------------------------------------------------------


def sanitizer():
    """The path of compute-sanitizer: from PATH, from the toolkit of nvcc, or from CUDA_HOME."""
    nvcc = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME", ""), str(Path(nvcc).resolve().parents[1]) if nvcc else ""]
    for path in [None, *(f"{t}/bin:{t}/compute-sanitizer" for t in toolkits if t), "/usr/local/cuda/bin"]:
        if program := shutil.which("compute-sanitizer", path=path):
            return program
    print("compute-sanitizer was not found on PATH, beside nvcc or in CUDA_HOME", file=sys.stderr)
    raise SystemExit(2)


def command(program, tool, chosen):
    options = ["--tool", tool, "--error-exitcode", "1", "--launch-timeout", "60"]
    known = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    for name in ("--kernel-name", "--kernel-regex"):  # the option of newer versions, then of older ones
        if name in known:
            options += [name, "kns=liger"]
            break
    return [program, *options, sys.executable, __file__, "--work", *chosen]


def check(program, tool, chosen, title):
    """True if one tool reports no error. With a title, the output is captured and printed only if there are
    errors."""
    # Without the caching allocator every tensor is a separate allocation, so memcheck detects out-of-bounds
    # accesses.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command(program, tool, chosen),
            env=environment,
            timeout=LIMIT,
            stdout=subprocess.PIPE if title else None,
            stderr=subprocess.STDOUT if title else None,
            text=True,
        )
    except subprocess.TimeoutExpired:
        print(f"{tool} {title}: no end within {LIMIT} s", file=sys.stderr)
        return False
    if title:
        print(f"{tool} {title}: {'found something' if done.returncode else 'nothing'}", flush=True)
        if done.returncode:
            print(done.stdout, flush=True)
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description="compute-sanitizer over every compiled op")
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, []], help=f"{', '.join(TOOLS)}")
    parser.add_argument("--each", action="store_true", help="a process for every piece of work")
    parser.add_argument("--work", nargs="*", metavar="NAME", help="these alone")
    arguments = parser.parse_args()
    if arguments.work is not None and not arguments.tools:
        work(arguments.work)
        return 0
    program = sanitizer()
    failed = []
    for tool in arguments.tools or DEFAULT_TOOLS:
        print(f"--- {tool}", flush=True)
        if arguments.each:
            with ThreadPoolExecutor(MAX_PROCESSES) as pool:
                pieces = arguments.work or names()
                clean = list(pool.map(check, repeat(program), repeat(tool), ([p] for p in pieces), pieces))
                failed += [f"{tool} {name}" for name, ok in zip(pieces, clean, strict=True) if not ok]
        elif not check(program, tool, arguments.work or [], ""):
            failed.append(tool)
    print(f"found something: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
