#!/usr/bin/env bash
# Fetch the wheels that bench/gpu_check.sh may need on a machine without a network, into var/wheels (git-ignored).
#
#   bash bench/carry.sh [PYTHON [MACHINE]]     for example: bash bench/carry.sh 3.12 aarch64
#
# That machine has numpy, pytest, cuda-bindings and NVRTC. gpu_check installs only what it cannot import there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:-3.12}
machine=${2:-x86_64}
python=${DS4_PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
# tokenizers: the engine's tokenizer. threadpoolctl: the quantizer. rich (with three of its needs): the command line,
# whose functions the engine's tests use. gguf (with two), ml_dtypes: tests compare with them.
wheels=(tokenizers threadpoolctl rich markdown-it-py mdurl pygments gguf pyyaml tqdm ml_dtypes)

platforms=()
for glibc in 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_$machine"); done
rm -rf var/wheels
mkdir -p var/wheels
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$version" --implementation cp "${platforms[@]}" --platform "manylinux2014_$machine" \
    --dest var/wheels "${wheels[@]}"
ls -1 var/wheels
du -sh var/wheels
