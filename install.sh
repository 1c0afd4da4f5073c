#!/usr/bin/env bash
# Install ds4, start its server, ask it a question; or start, stop and look at the server.
#
#   bash install.sh [--dir D] [--model DIR|FILE] [--engram-dir E] [--host H] [--port N] [--no-start]
#                   [--domain NAME|FOLDER|none] [--hub OWNER/REPO[@REV] [--shards ...] [--endpoint URL] [--no-xet]]
#   bash install.sh start [--domain NAME|FOLDER|none] [--dir D]
#   bash install.sh stop|status [--dir D]
#
# This file only finds a Python; the work is in ds4/cli/install.py, which needs nothing but the standard library.
# DS4_PYTHON names another interpreter, DS4_CXX another C++ compiler.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

fits() {
    command -v "$1" >/dev/null 2>&1 && "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

python=
if [ -n "${DS4_PYTHON:-}" ]; then
    candidates=("$DS4_PYTHON")
else
    candidates=(python3 python3.14 python3.13 python3.12 python3.11)
fi
for candidate in "${candidates[@]}"; do
    if fits "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "error: no Python 3.11 or newer (tried: ${candidates[*]}); install one, for instance with" >&2
    echo "  apt-get install python3 python3-venv      (Debian 12, Ubuntu 24.04 or newer)" >&2
    echo "or name one in DS4_PYTHON" >&2
    exit 1
fi

exec "$python" -I -B -c '
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("ds4.cli.install", run_name="__main__", alter_sys=True)
' "$root" "$@"
