#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause

# Installs this checkout, editable:  scripts/install.sh PYTHON ARGUMENTS OF PIP, such as  . --group test
#
# CUDA kernels are built for the GPUs of this machine, and not without one. Where LIGER_BUILD_CUDA, LIGER_CUDA_ARCHS or
# TORCH_CUDA_ARCH_LIST is set, that decides.
# The build is not isolated: it uses the torch of that interpreter (one is installed when there is none) instead of
# fetching a second one of several gigabytes. What is there already is left as it is, and then no network is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

if [ ! -x "$(command -v "$python")" ]; then
  # Only the default, .venv/bin/python, is made on first use; a wrong LIGER_PYTHON is a mistake.
  [ "$python" = .venv/bin/python ] || { echo "install.sh: no such interpreter: $python" >&2; exit 1; }
  echo "Creating the virtual environment .venv"
  python3 -m venv .venv
fi

requires=$("$python" - <<'PY'
import ast, pathlib, re
text = pathlib.Path("pyproject.toml").read_text()
print(*ast.literal_eval(re.search(r"^requires = (\[.*?\])", text, re.M | re.S)[1]), sep="\n")
PY
)
# pip of this version is the first that knows dependency groups.
"$python" -m pip install --quiet "pip>=25.1"
xargs --delimiter='\n' "$python" -m pip install --quiet <<<"$requires"
# cmake, unless a new enough one is on PATH: what the build backend would ask for in an isolated build.
tools=$("$python" -c 'from scikit_build_core.build import get_requires_for_build_editable as r; print(*r(), sep="\n")')
[ -z "$tools" ] || xargs --delimiter='\n' "$python" -m pip install --quiet <<<"$tools"
if [ -z "${LIGER_BUILD_CUDA:-}${LIGER_CUDA_ARCHS:-}${TORCH_CUDA_ARCH_LIST:-}" ]; then
  nvidia-smi --list-gpus >/dev/null 2>&1 || export LIGER_BUILD_CUDA=0
fi
"$python" -m pip install --quiet --no-build-isolation --editable "$@"
