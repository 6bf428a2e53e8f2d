#!/usr/bin/env bash
# Proves and measures the executor on this machine's GPU: one table, and JSON to send. See docs/gpu.md.
# usage: gpu_check.sh [--device cuda|cpu] [--tiny] [--budget-s 300] [--without PACKAGE] [--stages A,B]
#
# PYTHON  interpreter with torch (else ./.venv's, else python3)
# OUT     where gpu_check.json and the other files go (else build/gpu_check)
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)

python=
for candidate in ${PYTHON:-} ${PYTHON:+none} "$checkout/.venv/bin/python" python3; do
    [ "$candidate" != none ] || break
    if "$candidate" -c 'import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) or not u.find_spec("torch"))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "No Python 3.11 or newer with torch: tried ${PYTHON:-$checkout/.venv/bin/python and python3}." >&2
    echo "Name one, as in PYTHON=/path/to/python $0" >&2
    exit 2
fi

# Where the checkout can't be written to, all goes to a directory of the user's own.
build=$checkout/build/gpu-check
if ! mkdir -p "$build" 2>/dev/null || ! [ -w "$build" ]; then
    build=${TMPDIR:-/tmp}/neoflex-gpu-check-$(id -u)
    mkdir -p -m 700 "$build"
    [ -O "$build" ] || { echo "$build is somebody else's." >&2; exit 2; }
fi
OUT=${OUT:-$([ -w "$checkout/build" ] && echo "$checkout/build/gpu_check" || echo "$build/out")}
mkdir -p "$OUT"
# Packages come from `tree`, whatever the current directory holds.
export OUT PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 TRITON_CACHE_DIR=$build/triton

tree=$("$python" "$checkout/benchmarks/gpu_check/build.py" "$checkout" "$build")
export PYTHONPATH=$tree:$checkout/benchmarks
exec "$python" -m gpu_check --checkout "$checkout" "$@"
