# SPDX-License-Identifier: BSD-3-Clause
"""Registers and stack of every kernel of libliger_cuda.so, compared with the recorded ones.

    python scripts/release/kernels.py libliger_cuda.so            compares; exit code 1 if a kernel needs more
    python scripts/release/kernels.py --record libliger_cuda.so   records the architectures of this library

The stack of a kernel is its spills and its local arrays, in bytes per thread. One row of kernel_resources.tsv
has the instantiations of one kernel template for one architecture: their number, the maximum registers, the
largest stack, and the sum of their stacks. Needs cuobjdump, of the CUDA toolkit or of triton, and c++filt.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path

RECORDED = Path(__file__).with_name("kernel_resources.tsv")
COLUMNS = ("kernel", "architecture", "instances", "registers", "stack", "stack_sum")
# Growth that is accepted, since compilers differ: registers are allocated in groups of eight per thread.
MORE_REGISTERS = 8
MORE_STACK = 16
MORE_STACK_SUM = 1.1


@dataclass
class Resources:
    instances: int = 0
    registers: int = 0
    stack: int = 0
    stack_sum: int = 0

    def add(self, registers, stack):
        self.instances += 1
        self.registers = max(self.registers, registers)
        self.stack = max(self.stack, stack)
        self.stack_sum += stack


def find_cuobjdump():
    """Its path: on PATH, in CUDA_HOME or beside nvcc, or in triton."""
    folders = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    nvcc = shutil.which("nvcc")
    if nvcc:
        folders.append(Path(nvcc).resolve().parent)
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    found = shutil.which("cuobjdump") or shutil.which(
        "cuobjdump", path=os.pathsep.join(str(folder) for folder in folders)
    )
    if found is None:
        raise FileNotFoundError("cuobjdump is not on PATH, in CUDA_HOME, beside nvcc or in triton")
    return found


def template_name(demangled):
    """liger::rms_norm_kernel of "void liger::(anonymous namespace)::rms_norm_kernel<float, 4>(...)"."""
    name = demangled.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", name, maxsplit=1)[0]


def parse(dump):
    """{(kernel template, architecture): Resources} of the demangled output of cuobjdump
    --dump-resource-usage."""
    found = defaultdict(Resources)
    arch = kernel = None
    for line in dump.splitlines():
        if match := re.fullmatch(r"arch = sm_(\w+)", line.strip()):
            arch = match[1]
        elif match := re.match(r"\s*Function (.+):\s*$", line):
            kernel = template_name(match[1])
        elif match := re.match(r"\s*REG:(\d+) STACK:(\d+) ", line):
            found[kernel, arch].add(int(match[1]), int(match[2]))
    return dict(found)


def resources_of(library):
    dump = subprocess.run(
        [find_cuobjdump(), "--dump-resource-usage", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return parse(subprocess.run(["c++filt"], input=dump, check=True, capture_output=True, text=True).stdout)


def read(path=RECORDED):
    lines = path.read_text().splitlines()
    assert tuple(lines[0].split("\t")) == COLUMNS, path
    rows = [line.split("\t") for line in lines[1:]]
    return {(kernel, arch): Resources(*map(int, numbers)) for kernel, arch, *numbers in rows}


def record(found, path=RECORDED):
    """Replaces the rows of the architectures that were found."""
    archs = {arch for _, arch in found}
    kept = read(path) if path.exists() else {}
    rows = {key: r for key, r in kept.items() if key[1] not in archs} | found
    lines = ["\t".join(COLUMNS)]
    for kernel, arch in sorted(rows, key=lambda key: (key[0], int(key[1].rstrip("af")), key[1])):
        lines.append("\t".join(map(str, (kernel, arch, *astuple(rows[kernel, arch])))))
    path.write_text("\n".join(lines) + "\n")


def exceeded(found, recorded):
    """One sentence per kernel that needs more than was recorded, has no record, or has gone."""
    archs = {arch for _, arch in found}
    problems = [
        f"architecture {arch}: no kernel is recorded"
        for arch in sorted(archs - {arch for _, arch in recorded})
    ]
    for (kernel, arch), now in sorted(found.items()):
        before = recorded.get((kernel, arch))
        if before is None:
            problems += [f"{kernel} for {arch}: not recorded"] if arch in {a for _, a in recorded} else []
            continue
        limits = {
            "registers": before.registers + MORE_REGISTERS,
            "stack": before.stack + MORE_STACK,
            "stack_sum": max(before.stack_sum * MORE_STACK_SUM, before.stack_sum + MORE_STACK),
        }
        # More instantiations may have more stack in all.
        if now.instances != before.instances:
            del limits["stack_sum"]
        problems += [
            f"{kernel} for {arch}: {name} {getattr(before, name)} -> {getattr(now, name)}"
            for name, limit in limits.items()
            if getattr(now, name) > limit
        ]
    gone = sorted(key for key in recorded if key[1] in archs and key not in found)
    return problems + [f"{kernel} for {arch}: recorded, but not in the library" for kernel, arch in gone]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--table", type=Path, default=RECORDED)
    options = parser.parse_args(arguments)
    found = resources_of(options.library)
    if not found:
        parser.error(f"{options.library} has no kernels")
    archs = sorted({arch for _, arch in found})
    if options.record:
        record(found, options.table)
        print(f"{len(found)} rows for {', '.join(archs)} in {options.table}")
        return 0
    problems = exceeded(found, read(options.table))
    print("\n".join(problems) or f"{len(found)} rows for {', '.join(archs)}: within the record")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
