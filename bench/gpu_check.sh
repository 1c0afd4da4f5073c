#!/usr/bin/env bash
# Everything worth asking a machine with an NVIDIA GPU, in one command and under six minutes: kernel tests, bit-equality
# gates and distance to the teacher on the real driver, then bench/launches.py and bench/tokens.py, plain and with
# drafts. One table last, then a line of JSON.
#
#   bash bench/gpu_check.sh [--wheels DIR] [--out DIR] [--seconds 340] [--driver nvidia|simt] [--every N]
#
# Needs Python 3.11 or later (3.12 is what was planned for) with numpy, pytest, cuda-bindings and NVRTC, no network, no
# server packages. Wheels of what else is missing are taken from --wheels, $GPU_CHECK_WHEELS or var/wheels, where
# bench/carry.sh puts them; they go to a temporary folder, not into the Python that is there.
#
#   --driver simt   the same stages on the CPU driver, to try this script without a GPU
#   --every N       only each N-th test of a stage
#   --out DIR       keep the reports there (result.json, one file a stage)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wheels=${GPU_CHECK_WHEELS:-var/wheels}
args=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?--wheels needs a folder}; shift 2 ;;
        -h | --help) sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \{0,1\}//'; exit 0 ;;
        *) args+=("$1"); shift ;;
    esac
done

python=${DS4_PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "gpu_check: $python is older than 3.11; name another one with DS4_PYTHON" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Only what cannot be imported is taken from the wheels: the versions of the machine itself come first.
found=()
for pair in tokenizers:tokenizers threadpoolctl:threadpoolctl rich:rich markdown_it:markdown_it_py mdurl:mdurl \
    pygments:pygments gguf:gguf yaml:pyyaml tqdm:tqdm ml_dtypes:ml_dtypes; do
    module=${pair%%:*} name=${pair##*:}
    "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" && continue
    wheel=$(find "$wheels" -maxdepth 1 -iname "$name-*.whl" 2>/dev/null | head -n 1)
    if [ -n "$wheel" ]; then found+=("$wheel"); else echo "gpu_check: no $module here, no wheel of it in $wheels"; fi
done
if [ ${#found[@]} -gt 0 ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --target "$work/site" "${found[@]}"
fi

export PYTHONPATH=$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}
export DS4_CACHE=${DS4_CACHE:-$work/cache} PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false
"$python" bench/gpu_stages.py --work "$work" "${args[@]}"
