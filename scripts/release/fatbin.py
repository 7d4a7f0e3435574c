# SPDX-License-Identifier: BSD-3-Clause
"""Size of the GPU code of a library, per architecture:  python scripts/release/fatbin.py libliger_cuda.so

The section .nv_fatbin is a sequence of containers, one per source file. Each has a header and entries:
machine code or PTX for one architecture, usually compressed. The layout is not documented by NVIDIA; an
unknown one is an error.
"""

import struct
import sys
from collections import Counter
from pathlib import Path

MAGIC = 0xBA55ED50
KINDS = {1: "PTX", 2: "machine code"}
# Bit of the flags of an entry: architecture-specific code, the suffix "a".
ARCH_SPECIFIC = 0x100000


def section(elf, wanted):
    """(offset, size) of a section of a 64-bit little-endian ELF file; (0, 0) if it has none of that name."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        if elf[start : elf.index(b"\0", start)] == wanted.encode():
            return offset, size
    return 0, 0


def code_sizes(elf):
    """{("machine code" or "PTX", architecture such as "90a"): bytes in the file}"""
    sizes = Counter()
    position, size = section(elf, ".nv_fatbin")
    end = position + size
    while position < end:
        magic, _, header, length = struct.unpack_from("<IHHQ", elf, position)
        if magic == 0:  # padding between containers
            position += 8
            continue
        if magic != MAGIC:
            raise ValueError(f"unknown layout of .nv_fatbin: {magic:#x} where a container should begin")
        entry, position = position + header, position + header + length
        while entry < position:
            kind, _, entry_header, entry_length = struct.unpack_from("<HHIQ", elf, entry)
            (arch,) = struct.unpack_from("<I", elf, entry + 28)
            (flags,) = struct.unpack_from("<Q", elf, entry + 40)
            if kind not in KINDS:
                raise ValueError(f"unknown layout of .nv_fatbin: an entry of kind {kind}")
            sizes[KINDS[kind], f"{arch}{'a' if flags & ARCH_SPECIFIC else ''}"] += entry_header + entry_length
            entry += entry_header + entry_length
    return dict(sizes)


def report(path):
    """Lines of a Markdown table with the size of each part of a library."""
    elf = Path(path).read_bytes()
    sizes = code_sizes(elf)
    in_order = sorted(sizes.items(), key=lambda item: (item[0][0], int(item[0][1].rstrip("a"))))
    rows = [(f"{kind} for {arch}", n) for (kind, arch), n in in_order]
    rows += [("host code and data", len(elf) - sum(sizes.values())), (Path(path).name, len(elf))]
    return ["| part | MB |", "|---|---|", *(f"| {name} | {n / 1e6:.2f} |" for name, n in rows)]


if __name__ == "__main__":
    print("\n".join(report(sys.argv[1])))
