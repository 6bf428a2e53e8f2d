#!/bin/sh
# Says plainly what this machine lacks for building NeoFlex; with --python prints the interpreter to use.
# usage: check_machine.sh [--python] [INTERPRETER]
set -u
print_python=no
if [ "${1:-}" = --python ]; then print_python=yes; shift; fi
wanted=${1:-}

is_new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

python=
for candidate in $wanted ${wanted:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if is_new_enough "$candidate"; then python=$candidate; break; fi
done
if [ "$print_python" = yes ]; then echo "${python:-python3}"; exit 0; fi

missing=no
lacks() { echo "missing: $1" >&2; echo "    $2" >&2; missing=yes; }

[ "$(uname -s)" = Linux ] || lacks "Linux" "NeoFlex uses futexes, OFD locks and /dev/shm."
if [ -z "$python" ]; then
    lacks "Python 3.11 or newer" "Debian/Ubuntu: apt-get install python3 python3-venv python3-dev; or make PYTHON=/path/to/python"
else
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        lacks "venv of $python" "Debian/Ubuntu: apt-get install python3-venv"
    "$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        lacks "C headers of $python" "Debian/Ubuntu: apt-get install python3-dev"
fi
if ! echo 'int main() { return 0; }' | ${CXX:-c++} -std=c++20 -x c++ -o /dev/null - >/dev/null 2>&1; then
    lacks "a C++20 compiler" "Debian/Ubuntu: apt-get install g++; or set CXX"
fi
[ "$missing" = no ]
