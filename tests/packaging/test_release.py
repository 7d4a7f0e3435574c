# SPDX-License-Identifier: BSD-3-Clause
"""scripts/release_check.py: what it accepts, and what it refuses. The whole script takes hours and is not run
here."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = """
template <int n> __global__ void fill(float* out) { out[threadIdx.x] = n; }
__global__ void indexed(float* out, int i) {
  float values[64];
  for (int k = 0; k < 64; ++k) values[k] = out[k];
  for (int k = 0; k < i; ++k) values[k * i % 64] += values[k];
  for (int k = 0; k < 64; ++k) out[k + 64] = values[k];
}
void launch(float* out) {
  fill<1><<<1, 32>>>(out);
  fill<2><<<1, 32>>>(out);
  indexed<<<1, 32>>>(out, 3);
}
"""


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A shared object with the kernels of SOURCE for 80 and 90a, and PTX of 80."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cu").write_text(SOURCE)
    codes = ("arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a")
    subprocess.run(
        [
            "nvcc",
            "-shared",
            "-Xcompiler=-fPIC",
            *(f"-gencode={c}" for c in codes),
            "kernels.cu",
            "-o",
            "k.so",
        ],
        cwd=folder,
        check=True,
    )
    return folder / "k.so"


# --- size per architecture ----------------------------------------------------------------------------------


@pytest.mark.packaging
def test_sizes_of_the_gpu_code(library):
    from release import fatbin

    elf = library.read_bytes()
    sizes = fatbin.code_sizes(elf)
    assert sizes.keys() >= {("machine code", "80"), ("machine code", "90a"), ("PTX", "80")}
    _, section = fatbin.section(elf, ".nv_fatbin")
    assert 0.5 * section < sum(sizes.values()) <= section
    lines = fatbin.report(library)
    assert any(line.startswith("| machine code for 90a | ") for line in lines)
    assert lines[-1] == f"| k.so | {len(elf) / 1e6:.2f} |"


@pytest.mark.packaging
def test_an_unknown_layout_of_gpu_code_is_an_error(library):
    from release import fatbin

    elf = bytearray(library.read_bytes())
    offset, _ = fatbin.section(elf, ".nv_fatbin")
    elf[offset : offset + 4] = b"\1\2\3\4"
    with pytest.raises(ValueError, match=r"unknown layout of .nv_fatbin: 0x4030201"):
        fatbin.code_sizes(bytes(elf))
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        fatbin.code_sizes(b"MZ" * 100)


# --- registers and stack ------------------------------------------------------------------------------------


@pytest.mark.packaging
def test_kernels_are_recorded_and_compared(library, tmp_path, capsys):
    from release import kernels

    table = tmp_path / "table.tsv"
    try:
        kernels.find_cuobjdump()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert kernels.main([str(library), "--record", "--table", str(table)]) == 0
    recorded = kernels.read(table)
    assert recorded.keys() == {(k, a) for k in ("fill", "indexed") for a in ("80", "90a")}
    assert recorded["fill", "80"].instances == 2 and recorded["fill", "80"].stack == 0
    assert recorded["indexed", "90a"].stack >= 256 and recorded["indexed", "90a"].registers > 0
    assert kernels.main([str(library), "--table", str(table)]) == 0
    # As if the stack had been smaller when it was recorded.
    recorded["indexed", "90a"].stack = recorded["indexed", "90a"].stack_sum = 128
    kernels.record(recorded, table)
    capsys.readouterr()
    assert kernels.main([str(library), "--table", str(table)]) == 1
    assert "indexed for 90a: stack 128 -> " in capsys.readouterr().out


def test_what_is_more_than_was_recorded():
    from release.kernels import Resources, exceeded

    f, g = {("f", "80"): Resources(4, 64, 32, 640)}, {("g", "80"): Resources(1, 8, 0, 0)}
    of_12 = {("f", "120"): Resources(1, 8, 0, 0)}
    for found, recorded, said in (
        (Resources(4, 72, 48, 704), f, []),
        (Resources(4, 73, 32, 640), f, ["f for 80: registers 64 -> 73"]),
        (Resources(4, 64, 49, 640), f, ["f for 80: stack 32 -> 49"]),
        (Resources(4, 64, 32, 705), f, ["f for 80: stack_sum 640 -> 705"]),
        (Resources(5, 64, 32, 900), f, []),
        (f | g, f, ["g for 80: not recorded"]),
        (g, f, ["g for 80: not recorded", "f for 80: recorded, but not in the library"]),
        # A build for fewer architectures than were recorded is compared in those that it has.
        (f, f | of_12, []),
        (of_12, f, ["architecture 120: no kernel is recorded"]),
    ):
        found = {("f", "80"): found} if isinstance(found, Resources) else found
        assert exceeded(found, recorded) == said


def test_every_architecture_of_a_release_is_recorded():
    from release.kernels import read

    settings = (ROOT / "cmake/LigerCuda.cmake").read_text()
    (archs,) = re.findall(r"^set\(LIGER_ALL_ARCHS (.+)\)$", settings, re.M)
    recorded = read()
    assert {arch for _, arch in recorded} == set(archs.split())
    # The engine of 9.0 exists there alone; the other kernels are compiled for all.
    for arch in archs.split():
        assert ("liger::rms_norm_kernel", arch) in recorded


# --- wheels -------------------------------------------------------------------------------------------------


def a_wheel(
    folder,
    components=("torch",),
    version="0.2.0",
    tag="py3-none-manylinux_2_28_x86_64",
    name=None,
    extension=None,
):
    folder.mkdir(exist_ok=True)
    path = folder / f"liger_ops-0.2.0-{name or tag}.whl"
    document = {
        "metadata": {"component": {"name": "liger-ops", "version": version}},
        "components": [{"type": "library", "name": c, "version": "2.10.3"} for c in components],
    }
    with zipfile.ZipFile(path, "w") as archive:
        if extension:
            archive.writestr(f"liger/libliger_C_{extension}.so", "")
        archive.writestr(
            zipfile.ZipInfo("liger_ops-0.2.0.dist-info/WHEEL"), f"Wheel-Version: 1.0\nTag: {tag}\n"
        )
        if components:
            bill = zipfile.ZipInfo("liger_ops-0.2.0.dist-info/sboms/liger-ops.cdx.json")
            archive.writestr(bill, json.dumps(document))
    return path


NAMED = r"is not named liger_ops-0\.2\.0-py3-none-manylinux"
MANYLINUX, LINUX = "py3-none-manylinux_2_28_x86_64", "py3-none-linux_x86_64"
# What is wrong with a wheel: its settings, the check with arguments, the words of the refusal.
REFUSED = [
    ({"tag": LINUX}, ("require_tag", "0.2.0"), NAMED),
    ({"tag": "py3-none-manylinux_2_34_x86_64"}, ("require_tag", "0.2.0"), NAMED),
    ({"tag": "cp311-cp311-manylinux_2_28_x86_64"}, ("require_tag", "0.2.0"), NAMED),
    # A wheel without CUDA kernels under the name of the one that has them.
    ({}, ("require_tag", "0.2.0+cpu"), r"is not named liger_ops-0\.2\.0\+cpu-py3-none-manylinux"),
    ({"tag": LINUX, "name": MANYLINUX}, ("require_tag", "0.2.0"), rf"has the tags \['{LINUX}'\] inside"),
    ({"components": ()}, ("require_bill_of_materials", "0.2.0", False), "has no bill of materials"),
    ({"version": "0.1.0"}, ("require_bill_of_materials", "0.2.0", False), "is of version 0.1.0, expected 0.2.0"),
    ({}, ("require_bill_of_materials", "0.2.0", True), r"\['torch'\], expected \['cccl', 'cuda-cudart', 'nvtx', '"),
    ({"extension": "cpython_312_torch_2_10"}, ("require_bill_of_materials", "0.2.0", False),
     r"\['torch'\], expected \['pybind11', 'torch'\]"),
    ({"extension": "cpython_312_torch_2_11", "components": ("torch", "pybind11")},
     ("require_bill_of_materials", "0.2.0", False), "has torch 2.10.3, but not the one of liger/lib"),
    ({}, ("require_size", 0), "has 0.0 MB, the budget is 0 MB"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "check", "words"), REFUSED)
def test_a_wheel_that_is_refused(tmp_path, settings, check, words):
    from release import wheels

    name, *arguments = check
    with pytest.raises(wheels.Failure, match=words):
        getattr(wheels, name)(a_wheel(tmp_path, **settings), *arguments)


def test_a_wheel_that_is_accepted(tmp_path):
    from release import wheels

    first, second = a_wheel(tmp_path / "1"), a_wheel(tmp_path / "2")
    wheels.require_tag(first, "0.2.0")
    wheels.require_bill_of_materials(first, "0.2.0", cuda=False)
    assert wheels.require_size(first) < 0.01 and len(wheels.require_identical(first, second)) == 64
    other = a_wheel(tmp_path / "3", components=("torch", "cccl"))
    with pytest.raises(
        wheels.Failure, match=r"differ in \['liger_ops-0.2.0.dist-info/sboms/liger-ops.cdx.json'\]"
    ):
        wheels.require_identical(first, other)


@pytest.mark.parametrize(
    ("machine", "versions", "words"),
    [
        (183, ("2.17", "2.28", "2.4"), None),
        (183, ("2.17", "2.34"), r"needs glibc \(2, 34\), expected 2.28 or older"),
        (62, ("2.17",), "is no library for aarch64: ELF machine 62"),
    ],
)
def test_a_library_for_aarch64(tmp_path, machine, versions, words):
    from release.wheels import Failure, require_aarch64

    path = tmp_path / "lib.so"
    needed = "".join(f"\0GLIBC_{version}" for version in versions) + "\0GLIBCXX_3.4.21\0"
    path.write_bytes(b"\x7fELF\2\1".ljust(18, b"\0") + machine.to_bytes(2, "little") + needed.encode())
    if words is None:
        assert require_aarch64(path) == "glibc 2.28"
    else:
        with pytest.raises(Failure, match=words):
            require_aarch64(path)


@pytest.mark.packaging
def test_a_library_outside_the_stable_abi(tmp_path):
    pytest.importorskip("torch_abi_audit")
    import torch

    from release.wheels import Failure, require_stable_abi

    library = next(Path(torch.__file__).parent.glob("_C.*.so"))
    with pytest.raises(Failure, match="outside torch's stable ABI"):
        require_stable_abi(library)


# --- sources and upload -----------------------------------------------------------------------------------


def test_sources_of_a_release(tmp_path):
    from release.stage import stage

    stage(ROOT, tmp_path / "sources", "0.2.0")
    settings = (tmp_path / "sources/pyproject.toml").read_text()
    (address,) = re.findall(r'^Repository = "(https://.+/liger-ops)"', settings, re.M)
    assert f'Changelog = "{address}/blob/v0.2.0/CHANGELOG.md"\n' in settings
    readme = (tmp_path / "sources/README.md").read_text()
    assert f"]({address}/blob/v0.2.0/docs/start/install.md)" in readme
    assert f"]({address}/raw/v0.2.0/docs/images/demo.png)" in readme
    targets = re.findall(r'(?:\]\(|<img src=")([^)"]+)[)"]', readme)
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert f"{address}/raw/v0.2.0/docs/images/experiment-E17-overview.png" in targets


def test_the_address_is_in_one_place():
    """What is published has the address of pyproject.toml: it may be a placeholder until the repository is
    known. No other file has the owner and the name of the repository."""
    (name,) = re.findall(
        r'^Repository = "https://[^/"]+/([^/"]+/[^/"]+)"', (ROOT / "pyproject.toml").read_text(), re.M
    )
    search = ["git", "grep", "--fixed-strings", "--name-only", name]
    found = subprocess.run(search, cwd=ROOT, capture_output=True, text=True)
    if found.returncode > 1:
        pytest.skip("no checkout: an sdist has no list of its files")
    assert found.stdout.split() == ["pyproject.toml"]


def test_tag_of_a_release(monkeypatch, tmp_path):
    import release_check
    from release.wheels import Failure

    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    (tmp_path / "python/liger").mkdir(parents=True)
    (tmp_path / "python/liger/__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("version: 1.2.3\n")
    (tmp_path / "pyproject.toml").write_text('Repository = "https://h/p"\n')
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.3, not released yet\n")
    with pytest.raises(Failure, match=r"expected '## 1\.2\.3, YYYY-MM-DD'"):
        release_check.check_tag("v1.2.3", "https://h/p")
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.3, 2026-12-01\n")
    release_check.check_tag("v1.2.3", "https://h/p")
    with pytest.raises(Failure, match=r"the tag is v1\.2, the version 1\.2\.3"):
        release_check.check_tag("v1.2", "https://h/p")
    with pytest.raises(Failure, match="does not have the address https://h/fork"):
        release_check.check_tag("v1.2.3", "https://h/fork")


@pytest.mark.packaging
def test_interpreters_that_a_wheel_has_the_extension_for():
    import torch

    import release_check

    settings = {
        "LIGER_EXTENSION_PYTHONS": sys.executable,
        "LIGER_EXTENSION_TORCH_DIRS": str(Path(torch.__file__).parent),
    }
    twice = {name: f"{value};{value}" for name, value in settings.items()}
    expected = [f"-D{name}={value}" for name, value in twice.items()]
    assert shlex.split(release_check.extensions([sys.executable] * 2)) == expected


def test_actions_are_pinned_by_hash():
    used = []
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        used += re.findall(r"^\s*-?\s*uses: (.+)$", path.read_text(), re.M)
    assert len(used) >= 10
    assert not [
        use for use in used if re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use) is None
    ]
    # One version of each.
    assert len(set(used)) == len({use.partition("@")[0] for use in used})


def a_package(folder):
    """A wheel of a project named liger-ops with one module."""
    path = folder / "liger_ops-0.2.0-py3-none-any.whl"
    info = "liger_ops-0.2.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rehearsed.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: liger-ops\nVersion: 0.2.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.packaging
def test_a_local_index_takes_an_upload_and_serves_it(tmp_path):
    pytest.importorskip("twine")
    import release_check
    from release import local_index

    package = a_package(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    with local_index.serve(tmp_path / "index") as address:
        with pytest.raises(subprocess.CalledProcessError) as failure:
            release_check.install(address, "0.2.0", tmp_path / "venv")
        assert "No matching distribution found for liger-ops==0.2.0" in failure.value.stdout
        release_check.upload([package], address)
        assert (tmp_path / "index" / package.name).read_bytes() == package.read_bytes()
        with pytest.raises(subprocess.CalledProcessError):  # a file cannot be replaced
            release_check.upload([package], address)
        release_check.install(address, "0.2.0", tmp_path / "venv")
    subprocess.run([tmp_path / "venv/bin/python", "-c", "import rehearsed"], check=True)


# --- the script -------------------------------------------------------------------------------------------


def test_a_failed_step_is_reported_and_the_next_one_runs(capsys):
    from release.wheels import Failure
    from release_check import Report

    report = Report()
    with report.step("first"):
        raise Failure("too large")
    with report.step("second"):
        subprocess.run([sys.executable, "-c", "print('why'); exit(3)"], check=True, stdout=-1, text=True)
    with report.step("third") as detail:
        detail("  detail")
    assert report.failed
    out = capsys.readouterr().out
    assert "- first: FAILED: too large" in out and "exit code 3\n    why" in out
    assert "- third: ok" in out and out.endswith("\n  detail\n")


def test_the_version_of_this_checkout_can_be_released():
    import liger
    import release_check

    version, heading = release_check.check_version()
    assert version == liger.__version__ and heading.startswith(f"## {version}")
