#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause

# Builds the package for one architecture into a folder of its own, and runs tests of the compiled kernels with it.
#   scripts/gpu_test_archs.sh <python> <architecture> [pytest arguments]
# With one that is older than the GPU, such as 80 on 9.0, the kernels run through PTX.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 arch=$2
shift 2

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
LIGER_BUILD_CUDA=1 LIGER_CUDA_ARCHS=$arch "$python" -m pip install --quiet --no-build-isolation --no-deps --target "$folder" .
export PYTHONPATH=$folder
# The installed package must not be the one that is tested.
"$python" - "$folder" "$arch" <<'PYTHON'
import sys
import liger
from liger._core.runtime.build_info import build_info
folder, arch = sys.argv[1:]
built = build_info()["cuda_archs"].split()
if not liger.__file__.startswith(folder) or built[0] != arch:
    sys.exit(f"liger is imported from {liger.__file__}, built for {' '.join(built)}: expected {folder}, {arch}")
PYTHON
"$python" -m liger_cli info
"$python" -m pytest -k "cuda-cuda or loaded_code" "$@" \
  tests/packaging/test_loaded_code.py \
  tests/ops/*/test_{softmax,cross_entropy,group_norm,rms_norm,layer_norm,divergence,fused_linear_ce}.py \
  tests/ops/*/test_{rms_norm_gated,qk_norm_rope}.py
