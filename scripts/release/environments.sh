#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause

# The environments that a release has liger._C for and is tested in:  scripts/release/environments.sh FOLDER
# Each supported Python (python3.10 ... on PATH) has another torch; the oldest has the oldest. Prints what release_check.py
# takes: a wheel has liger._C for each of these Pythons with each torch. An environment that is there is not made again.
set -euo pipefail
folder=$(realpath -m "$1")
cd "$(dirname "$0")/../.."

torch=(2.10 2.11 2.12 2.13 2.14)
for minor in 10 11 12 13 14; do
  made=$folder/3.$minor
  if [ ! -e "$made/complete" ]; then
    "python3.$minor" -m venv --clear "$made" >&2
    "$made/bin/pip" install --quiet "pip>=25.1" >&2
    "$made/bin/pip" install --quiet "torch==${torch[minor - 10]}.*" --group test >&2
    touch "$made/complete"
  fi
  printf -- '--python %s ' "$made/bin/python"
done
