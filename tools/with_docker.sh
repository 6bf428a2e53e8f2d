#!/usr/bin/env bash
# Runs a command with a Docker daemon, Compose 2 and the image's base at hand. What is there is used. What is missing
# comes from Debian's packages, where that is possible: root on Debian, and a kernel that lets a daemon run. Where it is
# not, this says so, runs nothing, and is no failure. A daemon that was started here ends with the command.
# usage: with_docker.sh COMMAND...
#
# The command finds docker in PATH; COMPOSE is the program to call in place of `docker compose`.
set -uo pipefail
cd "$(dirname "$0")/.."
here=$PWD/build/docker
base=${BASE_IMAGE:-python:3.11-slim-bookworm}
daemon=
mkdir -p "$here"

give_up() { echo "NOT TESTED: the compose stack: $1"; exit 0; }
step() { # its name, and a function; prints what it took
    local started=$SECONDS
    "$2" >"$here/$2.log" 2>&1 || { tail -5 "$here/$2.log"; give_up "no $1 (${here#"$PWD"/}/$2.log)"; }
    echo "$1: $((SECONDS - started)) s"
}
lacks() { ! command -v "$1" >/dev/null; }

install_packages() {
    [ "$(id -u)" = 0 ] && command -v apt-get || return
    apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${packages[@]}"
}

start_daemon() {
    # One that was killed leaves the number of its process, which may be somebody else's by now.
    local pid_file=/var/run/docker.pid
    if [ -f $pid_file ] && ! grep -qs dockerd "/proc/$(cat $pid_file)/cmdline"; then rm $pid_file; fi
    setsid dockerd </dev/null &
    daemon=$!
    for _ in $(seq 240); do
        if docker info; then return 0; fi
        kill -0 $daemon 2>/dev/null || return 1
        sleep 0.25
    done
    return 1
}

stop_daemon() {
    [ -n "$daemon" ] || return 0
    kill "$daemon"
    for _ in $(seq 120); do kill -0 "$daemon" 2>/dev/null || return 0; sleep 0.25; done
    echo "the Docker daemon does not end: process $daemon" >&2
}

# Debian 12 has Compose 1. The program of Debian 13 is linked against what Debian 12 has.
fetch_compose() {
    local apt=$here/apt options
    mkdir -p "$apt"/lists/partial "$apt"/cache/archives/partial
    echo 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main' >"$apt/sources"
    options=(-o Dir::Etc::SourceList="$apt/sources" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$apt/lists"
        -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root)
    (cd "$apt" && apt-get -q "${options[@]}" update && apt-get -q "${options[@]}" download docker-compose &&
        dpkg-deb -x docker-compose_*.deb . && mv usr/libexec/docker/cli-plugins/docker-compose "$here/docker-compose")
    rm -rf "$apt"
    "$here/docker-compose" version
}

# Stands in for Docker's python image where no registry is: Debian's own Python, and what this host trusts besides
# Debian's certificates. In memory, where dpkg's writing costs nothing.
make_base() {
    local memory=/dev/shm
    if grep -qE ' /dev/shm [^ ]+ [^ ]*(nodev|noexec)' /proc/mounts; then memory=/var/tmp; fi
    TMPDIR=$memory mmdebstrap --mode=root --variant=apt --include=ca-certificates,python3,python3-venv,python3-dev \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook='copy-in /usr/local/share/ca-certificates /usr/local/share' \
        --customize-hook='chroot "$1" update-ca-certificates' \
        --customize-hook='ln -s /usr/bin/python3 "$1/usr/local/bin/python"' bookworm - |
        docker import --change 'ENV LANG=C.UTF-8' --change 'CMD ["python3"]' \
            --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' - "$base"
}

has_compose() { "$@" version --short 2>/dev/null | grep -qE '^v?([2-9]|[1-9][0-9])\.'; }

trap stop_daemon EXIT
packages=()
if ! docker info >/dev/null 2>&1; then
    if lacks dockerd; then packages+=(docker.io iptables); fi
    if lacks mmdebstrap; then packages+=(mmdebstrap); fi
    if [ ${#packages[@]} -gt 0 ]; then step 'packages for a Docker daemon' install_packages; fi
    step 'Docker daemon' start_daemon
fi
if [ -z "${COMPOSE:-}" ] && ! has_compose docker compose; then
    if ! has_compose "$here/docker-compose"; then step 'Compose 2' fetch_compose; fi
    export COMPOSE=$here/docker-compose
fi
# A daemon that was here before has its own way to images.
if [ -n "$daemon" ] && ! docker image inspect "$base" >/dev/null 2>&1; then step "stand-in for $base" make_base; fi
"$@"
