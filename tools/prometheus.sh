#!/bin/sh
# Prints the directory that holds prometheus and promtool. Where this machine has none, Debian's package is unpacked
# below build/ and not installed: its daemon would start, and listen on every address.
set -eu
unpacked=build/prometheus/usr/bin

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then dirname "$(command -v promtool)"; exit 0; fi
if [ ! -x "$unpacked/promtool" ]; then
    mkdir -p build/prometheus
    if ! (cd build/prometheus && apt-get -q download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb) >&2
    then
        echo 'missing: prometheus and promtool; Debian/Ubuntu: apt-get update, apt-get install prometheus' >&2
        exit 1
    fi
fi
cd "$unpacked" && pwd
