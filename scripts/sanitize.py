"""Runs every compiled op in small sizes under compute-sanitizer: memcheck and synccheck, or the tools that are named.

    python scripts/sanitize.py [tools]

Arguments of the ops are those of tests/samples.py, and sizes that choose the kernels which those are too small for.
Only kernels of liger are checked. Ends with 1 where a tool found something, and with 2 where it cannot run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# racecheck is left to those who ask for it: on compute capability 9.0 the process ends under it with an illegal memory
# access and an internal error of the tool ("failed to handle a hardware exception"). The cause is not known.
DEFAULT_TOOLS = ("memcheck", "synccheck")
TOOLS = (*DEFAULT_TOOLS, "racecheck")
# Seconds for one tool, many times what it takes: a kernel that never ends.
LIMIT = 600


# --- the work that is checked -------------------------------------------------------------------------------------


def samples():
    """Every op of torch.ops.liger that has compiled kernels, with its samples."""
    import torch
    from samples import SAMPLES

    from liger.backend import FAMILIES

    ops = [op for family in FAMILIES.values() for op in family.torch_kernels]
    with torch.no_grad():
        for op in ops:
            for arguments in SAMPLES[op](torch.device("cuda")):
                getattr(torch.ops.liger, op)(*arguments)
    return len(ops)


def sizes():
    """Public functions forward and backward where longer rows and more of them have kernels of their own."""
    import torch

    import liger

    def run(function, *inputs, **fixed):
        leaves = [t.requires_grad_() for t in inputs]
        outputs = function(*leaves, **fixed)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad([o.sum() for o in outputs], leaves)

    def tensors(dtype, *shapes):
        return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]

    def classes(rows, vocab):
        target = torch.randint(vocab, (rows,), device="cuda")
        target[::3] = -100
        return target

    for dtype in (torch.bfloat16, torch.float32):
        for columns in (64, 1000, 4096, 9001, 40000, 131072):
            x, other, weight, bias = tensors(dtype, (3, columns), (3, columns), (columns,), (columns,))
            target = classes(3, columns)
            run(liger.softmax, x)
            run(liger.rms_norm, x, weight)
            run(liger.layer_norm, x, weight, bias)
            run(liger.cross_entropy, x, target=target)
            run(liger.cross_entropy, x, target=target, label_smoothing=0.1, softcap=9.0)
            for divergence in (liger.kl_div, liger.jsd, liger.tvd):
                run(divergence, x, teacher=other)
        for shape in ((2, 32, 9), (2, 32, 32, 32), (1, 64, 96, 96), (1, 32, 256, 256)):
            x, weight, bias = tensors(dtype, shape, shape[1:2], shape[1:2])
            run(lambda x, weight, bias: liger.group_norm(x, 32, weight, bias), x, weight, bias)
        run(liger.fused_linear_ce, *tensors(dtype, (300, 128), (1000, 128)), target=classes(300, 1000))
    # The matrix units of compute capability 9.0, where the kernels were built for them.
    x, weight = tensors(torch.bfloat16, (600, 256), (2048, 256))
    target = classes(600, 2048)
    run(liger.fused_linear_ce, x, weight, target=target)
    run(liger.fused_linear_ce, x, weight, target=target, memory_budget=1 << 20)
    run(liger.fused_linear_logprobs, x, weight, targets=target)


def work():
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    import liger

    liger.set_backend("cuda")
    torch.manual_seed(0)
    count = samples()
    sizes()
    torch.cuda.synchronize()
    print(f"{count} ops ran")


# --- the tools ----------------------------------------------------------------------------------------------------


def sanitizer():
    """The program: on PATH, or beside nvcc."""
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME", ""), str(Path(nvcc).resolve().parents[1]) if nvcc else ""]
    for place in [None, *(f"{p}/bin:{p}/compute-sanitizer" for p in places if p), "/usr/local/cuda/bin"]:
        if found := shutil.which("compute-sanitizer", path=place):
            return found
    print("compute-sanitizer was not found on PATH, beside nvcc or in CUDA_HOME", file=sys.stderr)
    raise SystemExit(2)


def command(program, tool):
    options = ["--tool", tool, "--error-exitcode", "1", "--launch-timeout", "60"]
    known = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    for name in ("--kernel-name", "--kernel-regex"):  # of newer versions, of older ones
        if name in known:
            options += [name, "kns=liger"]
            break
    return [program, *options, sys.executable, __file__, "--work"]


def main(tools):
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown:
        print(f"unknown tool '{unknown[0]}', expected {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    program = sanitizer()
    # Without the allocator's cache every tensor has bounds of its own, which memcheck sees.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for tool in tools or DEFAULT_TOOLS:
        print(f"--- {tool}", flush=True)
        try:
            done = subprocess.run(command(program, tool), env=environment, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{tool}: no end within {LIMIT} s", file=sys.stderr)
            failed.append(tool)
            continue
        if done.returncode:
            failed.append(tool)
    print(f"found something: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        work()
    else:
        raise SystemExit(main(sys.argv[1:]))
