#!/bin/sh
# Compiles the C++ for AArch64, warnings being errors, and runs its tests in an emulator: on x86, nothing else does so
# with the NEON kernels. Root on Debian gets the compiler and the emulator installed; elsewhere a missing one is said
# aloud, and is no failure. An emulator on x86 shows neither speed nor what weakly ordered memory would do.
# usage: cross.sh BIN    (BIN holds cmake, ctest and ninja)
set -eu
compiler=aarch64-linux-gnu-g++
emulator=qemu-aarch64
build=build/aarch64

if [ "$(uname -m)" = aarch64 ]; then echo 'AArch64 is this machine: make test has tested NEON'; exit 0; fi
here() { command -v "$compiler" >/dev/null && command -v "$emulator" >/dev/null; }
if ! here && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
        g++-aarch64-linux-gnu qemu-user; } >/dev/null 2>&1 || true
fi
if ! here; then
    echo "NOT TESTED: the NEON kernels, neither compiled nor run: no $compiler and $emulator (Debian: g++-aarch64-linux-gnu, qemu-user)"
    exit 0
fi

"$1/cmake" -G Ninja -D CMAKE_MAKE_PROGRAM="$1/ninja" -S . -B "$build" -D NEOFLEX_TESTS=ON \
    -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_FLAGS=-Werror -D CMAKE_CXX_COMPILER="$compiler" \
    -D CMAKE_SYSTEM_NAME=Linux -D CMAKE_SYSTEM_PROCESSOR=aarch64 \
    -D CMAKE_CROSSCOMPILING_EMULATOR="$emulator;-L;/usr/aarch64-linux-gnu" >/dev/null
"$1/cmake" --build "$build"
"$1/ctest" --test-dir "$build" --output-on-failure
