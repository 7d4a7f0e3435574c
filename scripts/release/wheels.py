# SPDX-License-Identifier: BSD-3-Clause
"""What release_check.py examines in a wheel: tag, bill of materials, libraries, and equality with a second
build."""

import hashlib
import json
import platform
import re
import struct
import zipfile
from pathlib import Path

OLDEST_TORCH = (2, 10)
# In megabytes: of the wheel as it is downloaded, and of libliger_cuda.so as it is installed.
BUDGET = 60
SDIST_BUDGET = 1.5
PLATFORM = f"manylinux_2_28_{platform.machine()}"
EXCLUDED = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")
# liger._C has autograd nodes, which the stable ABI does not have: loaded into the Python and the torch of its
# file name alone.
UNSTABLE = "libliger_C_"


class Failure(Exception):
    """A check that did not pass, in one sentence."""


def differing_members(one, other):
    """Names of the files that two wheels or zip files do not have in common or not with the same content."""
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        names = set(first.namelist()) | set(second.namelist())
        common = set(first.namelist()) & set(second.namelist())
        return sorted(name for name in names if name not in common or first.read(name) != second.read(name))


def require_identical(one, other):
    """Two builds of one file, byte by byte."""
    digests = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in (one, other)]
    if digests[0] == digests[1]:
        return digests[0]
    if zipfile.is_zipfile(one):
        raise Failure(f"two builds of {Path(one).name} differ in {differing_members(one, other)}")
    raise Failure(f"two builds of {Path(one).name} differ: {digests[0]} and {digests[1]}")


def require_tag(wheel, version):
    """One wheel for every Python, of :data:`PLATFORM`, with the version in its name."""
    name = f"liger_ops-{version}-py3-none-{PLATFORM}.whl"
    if Path(wheel).name != name:
        raise Failure(f"{Path(wheel).name} is not named {name}")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/WHEEL")]
        tags = re.findall(r"^Tag: (.+)$", archive.read(name).decode(), re.M)
    if tags != [f"py3-none-{PLATFORM}"]:
        raise Failure(f"{Path(wheel).name} has the tags {tags} inside")


def require_bill_of_materials(wheel, version, cuda):
    """A CycloneDX document of this version that names the CUDA runtime, and pybind11 with every torch of
    liger._C, if, and only if, they are inside."""
    with zipfile.ZipFile(wheel) as archive:
        extensions = [n for n in archive.namelist() if Path(n).name.startswith(UNSTABLE)]
        names = [n for n in archive.namelist() if n.endswith(".dist-info/sboms/liger-ops.cdx.json")]
        if not names:
            raise Failure(f"{Path(wheel).name} has no bill of materials in .dist-info/sboms")
        text = archive.read(names[0]).decode()
    document = json.loads(text)
    found = document["metadata"]["component"]["version"]
    if found != version:
        raise Failure(f"the bill of materials is of version {found}, expected {version}")
    components = {component["name"] for component in document["components"]}
    expected = {"torch"} | ({"cuda-cudart", "nvtx", "cccl"} if cuda else set())
    expected |= {"pybind11"} if extensions else set()
    if components != expected:
        raise Failure(
            f"the bill of materials has the components {sorted(components)}, expected {sorted(expected)}"
        )
    torches = [c["version"] for c in document["components"] if c["name"] == "torch"]
    for library in extensions:
        abi = library.rpartition("_torch_")[2].removesuffix(".so")
        if not any(f"{re.sub('[^0-9A-Za-z]', '_', version)}_".startswith(f"{abi}_") for version in torches):
            raise Failure(
                f"the bill of materials has torch {', '.join(torches)}, but not the one of {library}"
            )
    try:
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator
    except ImportError:
        return f"{len(components)} components; not validated, cyclonedx-python-lib is not installed"
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if error is not None:
        raise Failure(f"the bill of materials is not valid CycloneDX 1.6: {error}")
    return f"{len(components)} components, valid CycloneDX 1.6"


def require_stable_abi(library):
    """The oldest torch that has every symbol of a library; Failure if it is newer than the one that is
    supported."""
    from torch_abi_audit import inspect_extension

    verdict = inspect_extension(Path(library)).torch
    if not verdict.stable or verdict.unstable_symbols or verdict.unknown_shim_symbols:
        raise Failure(f"{Path(library).name} uses symbols outside torch's stable ABI: {verdict}")
    oldest = tuple(int(part) for part in str(verdict.min_torch_version).split(".")[:2])
    if oldest > OLDEST_TORCH:
        raise Failure(f"{Path(library).name} needs torch {oldest}: {verdict.version_defining_symbols}")
    return ".".join(map(str, oldest))


def require_size(path, budget=BUDGET):
    size = Path(path).stat().st_size / 1e6
    if size > budget:
        raise Failure(f"{Path(path).name} has {size:.1f} MB, the budget is {budget} MB")
    return size


def require_aarch64(library):
    """A library for aarch64 that needs no symbol of glibc newer than 2.28; the version that it needs."""
    elf = Path(library).read_bytes()
    (machine,) = struct.unpack_from("<H", elf, 18)
    if elf[:6] != b"\x7fELF\2\1" or machine != 183:
        raise Failure(f"{Path(library).name} is no library for aarch64: ELF machine {machine}")
    needed = max(tuple(map(int, m.split(b"."))) for m in re.findall(rb"\0GLIBC_([\d.]+)(?=\0)", elf))
    if needed > (2, 28):
        raise Failure(f"{Path(library).name} needs glibc {needed}, expected 2.28 or older")
    return "glibc " + ".".join(map(str, needed))


def unpack_libraries(wheel, folder):
    """The paths of the compiled libraries of a wheel, extracted."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".so")]
        return [Path(archive.extract(name, folder)) for name in sorted(names)]
