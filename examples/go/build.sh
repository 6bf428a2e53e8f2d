#!/bin/sh
# build.sh OUT: generates the stubs and compiles OUT/chat with Debian's Go packages.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/src/neoflex/v1"
out=$(cd "$1" && pwd)
package=Mneoflex/v1/inference.proto=neoflex/v1
protoc -I "$here/../../proto" \
    --go_out="$out/src" --go_opt="$package" --go-grpc_out="$out/src" --go-grpc_opt="$package" \
    neoflex/v1/inference.proto
GO111MODULE=off GOFLAGS= GOPATH="$out:/usr/share/gocode" go build -o "$out/chat" "$here/chat.go"
