#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Builds what a release publishes and checks it, on one machine:  make release-check

Needs an interpreter with torch and the dependency groups "test" and "release", which make installs. The
builds have no network. Results are in dist/: the sdist, cuda/ and cpu/ with one wheel each, and
release-report.md. docs/development/releasing.md says what else a release needs.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

from release import fatbin, kernels, local_index, wheels
from release.stage import stage
from release.wheels import Failure

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/release"
# A selection that runs in a minute: the schemas, and ops of several families with the torch backend.
TESTS = [
    "tests/packaging/test_schemas.py",
    *(f"tests/ops/{op}.py" for op in ("norms/test_rms_norm", "rope/test_rope", "logits/test_cross_entropy")),
]


class Report:
    """Prints each step with its outcome, and remembers it."""

    def __init__(self):
        self.lines, self.failed = [], False

    def say(self, text):
        print(text, flush=True)
        self.lines.append(text)

    @contextlib.contextmanager
    def step(self, title):
        """Runs one step; a failure is reported, and the steps after it still run."""
        begin, details = time.monotonic(), []
        try:
            yield details.append
            outcome = "ok"
        except Failure as failure:
            outcome, self.failed = f"FAILED: {failure}", True
        except subprocess.CalledProcessError as error:
            log = (error.stdout or "").strip().splitlines()[-30:]
            outcome, self.failed = (
                "\n    ".join([f"FAILED: {error.cmd[0]} ... exit code {error.returncode}", *log]),
                True,
            )
        self.say(f"- {title}: {outcome} ({time.monotonic() - begin:.0f} s)")
        for detail in details:
            self.say(detail)


def call(*command, cwd=ROOT, **environment):
    """The output of a command, without the LIGER_* and Python settings of this process."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("LIGER_", "PYTHON", "TORCH_CUDA_ARCH_LIST"))
    }
    # Tools of this interpreter's environment, also where it is not activated.
    kept["PATH"] = sysconfig.get_path("scripts") + os.pathsep + kept["PATH"]
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {k: str(v) for k, v in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout


def without_network():
    """The start of a command line that has no network, where this user may have a network namespace."""
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None:
        return []
    return command if subprocess.run([*command, "true"], capture_output=True).returncode == 0 else []


def check_version():
    """The version, which CITATION.cff has, too, and its heading in the changelog."""
    source = (ROOT / "python/liger/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.M)
    if f"version: {version}" not in (ROOT / "CITATION.cff").read_text().splitlines():
        raise Failure(f"CITATION.cff has no line 'version: {version}'")
    section = re.search(rf"^## {re.escape(version)}, .+", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if section is None:
        raise Failure(f"CHANGELOG.md has no section {version}")
    return version, section[0]


def check_tag(tag, address):
    """That the checkout may be published under a tag, by the repository with this address."""
    version, heading = check_version()
    if tag != f"v{version}":
        raise Failure(f"the tag is {tag}, the version {version}")
    if re.fullmatch(r"## \S+, \d{4}-\d\d-\d\d", heading) is None:
        raise Failure(f"CHANGELOG.md has {heading!r}, expected '## {version}, YYYY-MM-DD'")
    if f'Repository = "{address}"' not in (ROOT / "pyproject.toml").read_text().splitlines():
        raise Failure(f"pyproject.toml does not have the address {address}")


def build_sdist(source, folder, epoch):
    shutil.rmtree(folder, ignore_errors=True)
    call(
        *(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, source),
        SOURCE_DATE_EPOCH=epoch,
    )
    (path,) = folder.glob("*.tar.gz")
    return path


def unpack_source(sdist):
    """The sources in a folder of always the same name: nvcc puts a hash of the path into symbol names."""
    shutil.rmtree(WORK / "source", ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(WORK / "source", filter="data")
    (folder,) = (WORK / "source").iterdir()
    return folder


def build_wheel(source, name, epoch, network, **settings):
    """A wheel from the unpacked sdist, in a build folder of its own, past the compiler cache."""
    for folder in (WORK / name, WORK / f"{name}-build"):
        shutil.rmtree(folder, ignore_errors=True)
    call(
        *(*network, sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"),
        *("--no-cache-dir", "-C", f"build-dir={WORK / f'{name}-build'}"),
        *("-C", "cmake.define.LIGER_MANYLINUX_2_28=ON", "-w", WORK / name, source),
        SOURCE_DATE_EPOCH=epoch,
        CCACHE_RECACHE="1",
        SCCACHE_RECACHE="1",
        **settings,
    )
    (path,) = (WORK / name).glob("*.whl")
    return path


def extensions(pythons):
    """Settings of a build with liger._C for each of these interpreters with the torch of each."""
    where = (
        "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('torch').origin).parent)"
    )
    folders = [call(python, "-c", where).split()[-1] for python in pythons]
    settings = {"LIGER_EXTENSION_PYTHONS": pythons, "LIGER_EXTENSION_TORCH_DIRS": folders}
    return " ".join(f"'-D{name}={';'.join(map(str, values))}'" for name, values in settings.items())


def repair(wheel, folder, epoch):
    """The wheel tagged with the platform of a release; an error if it needs newer symbols of the system."""
    shutil.rmtree(folder, ignore_errors=True)
    excluded = [part for name in wheels.EXCLUDED for part in ("--exclude", name)]
    how = ("--plat", wheels.PLATFORM, "--only-plat", *excluded)
    call("auditwheel", "repair", *how, "-w", folder, wheel, SOURCE_DATE_EPOCH=epoch)
    (path,) = folder.glob("*.whl")
    return path


def upload(files, address):
    """Uploads files of a release to a package index on this machine."""
    how = ("--non-interactive", "--disable-progress-bar", "--username", "any", "--password", "any")
    call("twine", "upload", *how, "--repository-url", address, *files, NO_PROXY="127.0.0.1")


def install(address, version, folder):
    """Installs liger-ops from a package index on this machine, and from nowhere else, into an environment."""
    how = (
        "--isolated",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
        "--ignore-installed",
        "--quiet",
    )
    call(
        *(sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", *how),
        *("--index-url", f"{address}simple/", f"liger-ops=={version}"),
        NO_PROXY="127.0.0.1",
        PIP_CONFIG_FILE=os.devnull,
    )


def make_empty_environment(folder):
    """A new environment with torch and what the tests need, from the package index that pip has by
    default."""
    shutil.rmtree(folder, ignore_errors=True)
    call(sys.executable, "-m", "venv", folder)
    call(folder / "bin/python", "-m", "pip", "install", "--quiet", "pip>=25.1")
    call(folder / "bin/python", "-m", "pip", "install", "--quiet", "torch", "--group", "test")


def make_environment(python, folder):
    """A new environment that sees the packages of another interpreter, which has torch and what the tests
    need."""
    shutil.rmtree(folder, ignore_errors=True)
    found = call(
        python, "-c", "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\\n')"
    )
    call(python, "-m", "venv", "--without-pip", folder)
    purelib = call(folder / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # A .pth line only adds the folder: hooks of editable installs in it are not run.
    Path(purelib.strip(), "outer.pth").write_text(found)


def run_tests(address, version, cuda, folder, extension):
    """A selection of tests with the wheel of an index, in an environment without liger; ``extension``: the
    wheel has liger._C for it."""
    install(address, version, folder)
    where = call(folder / "bin/python", "-c", "import liger; print(liger.__file__)", cwd=WORK).split()[-1]
    if not where.startswith(str(folder)):
        raise Failure(f"liger is imported from {where}, not from {folder}")
    # Without a GPU, too: loading resolves every symbol of torch and registers the kernels.
    loaded = (
        "import torch; from liger._core.runtime import load; "
        "print(load.C_REASON, load.CUDA_LOADED or torch.version.cuda, load.CUDA_REASON, sep='\\n')"
    )
    *_, reason, cuda_loaded, cuda_reason = call(folder / "bin/python", "-c", loaded, cwd=WORK).splitlines()
    if extension and not reason.startswith("built for"):
        raise Failure(f"liger._C is not loaded: {reason}")
    if cuda and cuda_loaded not in ("True", "None"):
        raise Failure(f"the CUDA kernels are not loaded: {cuda_reason}")
    versions = "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)"
    log = call(
        *(folder / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTS),
        OMP_NUM_THREADS=1,
    )
    return f"{call(folder / 'bin/python', '-c', versions, cwd=WORK).splitlines()[-1]}: {log.splitlines()[-1]}"


def run_demo(folder):
    """The demo of the wheel that is installed in an environment, on a tiny model; its verdict on the
    losses."""
    how = ("--size", "tiny", "--steps", 3, "--output", folder / "demo")
    log = call(folder / "bin/liger", "demo", *how, cwd=WORK, OMP_NUM_THREADS=2)
    return next(line for line in log.splitlines() if line.startswith("The losses agree"))


def check_wheel(report, kind, source, version, epoch, network, options):
    """Builds and examines one wheel; its path, or None."""
    settings = {"LIGER_CPU_WHEEL": 1}
    if kind == "cuda":
        settings = {"LIGER_BUILD_CUDA": 1, "LIGER_CUDA_ARCHS": options.archs}
    settings["CMAKE_ARGS"] = extensions(options.python)
    built = wheel = None
    with report.step(f"{kind}: a wheel from the sdist{', without network' if network else ''}"):
        built = build_wheel(source, f"{kind}-1", epoch, network, **settings)
    if built is None:
        return None
    if not options.once:
        with report.step(f"{kind}: a second build is identical"):
            wheels.require_identical(built, build_wheel(source, f"{kind}-2", epoch, network, **settings))
    with report.step(f"{kind}: auditwheel") as detail:
        wheel = repair(built, options.output / kind, epoch)
        wheels.require_tag(wheel, version)
        detail(f"  {wheel.name}")
    if wheel is None:
        return None
    with report.step(f"{kind}: twine check"):
        call("twine", "check", "--strict", wheel)
    with report.step(f"{kind}: bill of materials") as detail:
        detail("  " + wheels.require_bill_of_materials(wheel, version, kind == "cuda"))
    libraries = wheels.unpack_libraries(wheel, WORK / f"{kind}-libraries")
    for library in libraries:
        if library.name.startswith(wheels.UNSTABLE):
            continue
        with report.step(f"{kind}: stable ABI of {library.name}") as detail:
            detail(f"  needs torch {wheels.require_stable_abi(library)}")
    with report.step(f"{kind}: at most {wheels.BUDGET} MB") as detail:
        detail(f"  {wheel.name}: {wheels.require_size(wheel):.1f} MB")
        for library in libraries:
            wheels.require_size(library)
            for line in ["", *fatbin.report(library), ""] if library.name == "libliger_cuda.so" else []:
                detail(line)
    if kind == "cuda":
        with report.step("cuda: registers and stack of every kernel"):
            (library,) = [path for path in libraries if path.name == "libliger_cuda.so"]
            problems = kernels.exceeded(kernels.resources_of(library), kernels.read())
            if problems:
                raise Failure("\n    ".join([f"{len(problems)} problems", *problems]))
    return wheel


def check_aarch64(report, torch, source, version, epoch, network):
    """Cross-compiles the wheel without CUDA kernels for aarch64, against an unpacked torch, and examines
    it."""
    wheel = None
    with report.step("aarch64: a cross-compiled wheel") as detail:
        toolchain = source / "cmake/aarch64-linux-gnu.cmake"
        wheel = build_wheel(
            *(source, "aarch64", epoch, network),
            LIGER_CPU_WHEEL=1,
            _PYTHON_HOST_PLATFORM="linux-aarch64",
            CMAKE_ARGS=f"-DCMAKE_TOOLCHAIN_FILE={toolchain} -DLIGER_TORCH_DIR={torch}",
        )
        if wheel.name != f"liger_ops-{version}-py3-none-linux_aarch64.whl":
            raise Failure(f"the wheel is named {wheel.name}")
        detail(f"  {wheel.name}")
    for library in wheels.unpack_libraries(wheel, WORK / "aarch64-libraries") if wheel else []:
        with report.step(f"aarch64: {library.name}") as detail:
            needs = wheels.require_aarch64(library)
            if not library.name.startswith(wheels.UNSTABLE):
                needs += f", torch {wheels.require_stable_abi(library)}"
            detail(f"  needs {needs}")


def rehearse(report, kind, files, version, options):
    """Uploads the files of a release to an index of this machine, and tests what is installed from it."""
    shutil.rmtree(WORK / f"{kind}-index", ignore_errors=True)
    with local_index.serve(WORK / f"{kind}-index") as address:
        with report.step(f"{kind}: upload to a local index"):
            upload(files, address)
        for index, python in enumerate([sys.executable, *options.python]):
            folder = WORK / f"{kind}-venv-{index}"
            # The report is published: it does not name the folder of this interpreter.
            by = f" by {python}" if index else ""
            with report.step(f"{kind}: installed from the index, tests{by}") as detail:
                if options.empty and index == 0:
                    make_empty_environment(folder)
                else:
                    make_environment(python, folder)
                # The newest torch of --empty may be newer than the one of the build.
                extension = index > 0 or not options.empty
                detail("  " + run_tests(address, version, kind == "cuda", folder, extension))
        with report.step(f"{kind}: liger demo") as detail:
            detail("  " + run_demo(WORK / f"{kind}-venv-0"))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--archs", default="all", help="CUDA architectures, if not all that a release has")
    parser.add_argument("--no-cuda", action="store_true", help="only the wheel without CUDA kernels")
    parser.add_argument(
        "--aarch64", type=Path, metavar="TORCH", help="also a wheel for aarch64, with this unpacked torch"
    )
    parser.add_argument("--once", action="store_true", help="no second build of the wheels")
    parser.add_argument("--allow-dirty", action="store_true", help="uncommitted changes are no failure")
    parser.add_argument(
        "--empty",
        action="store_true",
        help="test in an environment that has nothing of this one; needs the network, for torch",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        type=os.path.abspath,
        help="a further interpreter, with torch and pytest, that tests the wheels, which have liger._C for every pair "
        "of these interpreters and their torch; may be repeated",
    )
    parser.add_argument(
        "--tag", nargs=2, metavar=("TAG", "ADDRESS"), help="of the release and the repository"
    )
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    WORK.mkdir(parents=True, exist_ok=True)
    report, network = Report(), without_network()
    epoch = call("git", "log", "-1", "--format=%ct").strip()
    version = sdist = None

    with report.step("the checkout is a commit"):
        changed = call("git", "status", "--porcelain").strip()
        if changed and not options.allow_dirty:
            raise Failure(f"uncommitted changes:\n    {changed}")
    with report.step("one version, and its section in the changelog") as detail:
        version, heading = check_version()
        detail(f"  {heading}")
        if options.tag:
            check_tag(*options.tag)
    with report.step(f"sdist: two builds are identical, twine check, at most {wheels.SDIST_BUDGET} MB"):
        stage(ROOT, WORK / "commit", version)
        sdist = build_sdist(WORK / "commit", WORK / "sdist-1", epoch)
        wheels.require_identical(sdist, build_sdist(WORK / "commit", WORK / "sdist-2", epoch))
        call("twine", "check", "--strict", sdist)
        wheels.require_size(sdist, wheels.SDIST_BUDGET)
        options.output.mkdir(parents=True, exist_ok=True)
        shutil.copy(sdist, options.output)

    if sdist is not None and version is not None:
        source = unpack_source(sdist)
        for kind in ["cpu"] if options.no_cuda else ["cpu", "cuda"]:
            built = version if kind == "cuda" else f"{version}+cpu"
            wheel = check_wheel(report, kind, source, built, epoch, network, options)
            if wheel is not None:
                rehearse(report, kind, [sdist, wheel], built, options)

        if options.aarch64:
            check_aarch64(report, options.aarch64.resolve(), source, f"{version}+cpu", epoch, network)

    report.say("FAILED" if report.failed else "All checks passed.")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "release-report.md").write_text("\n".join(report.lines) + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
