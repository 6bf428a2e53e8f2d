#!/bin/sh
# Builds and runs the C++ tests under each set of sanitizers.
# usage: sanitize.sh BIN    (BIN holds cmake, ctest and ninja)
set -eu
for sanitizers in address,undefined thread; do
    build=build/sanitize-${sanitizers%,*}
    "$1/cmake" -G Ninja -D CMAKE_MAKE_PROGRAM="$1/ninja" -S . -B "$build" -D NEOFLEX_TESTS=ON \
        -D NEOFLEX_SANITIZE="$sanitizers" -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_FLAGS_RELEASE=-O1 >/dev/null
    "$1/cmake" --build "$build"
    "$1/ctest" --test-dir "$build" --output-on-failure
done
