#!/usr/bin/env bash
# Builds the CPU images and starts them, without a container registry: the base image is a Debian made by debootstrap.
# Where a Docker daemon runs, compose.yaml is tried with them. Needs root, buildah, debootstrap, and a few GB in
# /var/lib/containers. Arguments are passed to `buildah build`, for
# example --volume /etc/pip.conf:/etc/pip.conf:ro.
set -euo pipefail
cd "$(dirname "$0")/.."
# Layers are kept, so that after a change of the source packages are not installed again. Where overlay file systems
# can't be mounted, vfs copies a whole image for each of its layers: then they aren't.
layers=(--layers)
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=${STORAGE_DRIVER:-overlay} COMPOSE_HTTP_TIMEOUT=600
BASE=localhost/fusionkv-base:bookworm
MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
MODEL=models/eased-3
work=$(mktemp -d)
containers=()
roots=()
composed=

for tool in buildah debootstrap; do
    command -v $tool >/dev/null || { echo "install first, as root: apt-get install buildah debootstrap"; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "run this as root: it creates root file systems"; exit 2; }
buildah info >/dev/null 2>&1 || { STORAGE_DRIVER=vfs && layers=(); }

say() { echo "[$SECONDS s] $*"; }

end() {
    local status=$?
    jobs -p | xargs -r kill 2>/dev/null || true
    wait
    [ -z "$composed" ] || $composed down --volumes >/dev/null 2>&1 || true
    for container in "${containers[@]}"; do buildah rm "$container" >/dev/null || true; done
    [ $status = 0 ] || tail -n 20 "$work"/*.log
    rm -rf "$work"
}
trap end EXIT

base() {
    buildah inspect --type image $BASE >/dev/null 2>&1 && return
    say "building the base image: Debian with Python"
    local container root
    container=$(buildah from scratch)
    containers+=("$container")
    root=$(buildah mount "$container")
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv \
        bookworm "$root" "$MIRROR" >"$work/debootstrap.log"
    # As in the official Python image, `python` and `pip` work system-wide.
    ln -s python3 "$root/usr/bin/python"
    rm "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    buildah unmount "$container" >/dev/null
    buildah commit --quiet "$container" $BASE >/dev/null
}

build() {
    local image=$1
    shift
    say "building the image $image"
    buildah build --quiet --format docker --target "$image" --build-arg PYTHON_IMAGE=$BASE "${layers[@]}" "$@" \
        --tag "localhost/fusionkv-$image" . >"$work/build-$image.log" 2>&1
    say "image $image: $(buildah inspect --type image --format '{{.OCIv1.Config.User}}' "localhost/fusionkv-$image")," \
        "$(buildah images --format '{{.Size}}' "localhost/fusionkv-$image")"
}

# Starts an image with its entry point and user. Further arguments are options of `buildah run`.
start() {
    local image=$1 container command
    shift
    container=$(buildah from "localhost/fusionkv-$image")
    containers+=("$container")
    roots+=("$(buildah mount "$container")")
    mapfile -t command < <(buildah inspect --format '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}' \
        "$container" | sed '/^$/d')
    say "starting $image: ${command[*]}"
    buildah run "$@" "$container" -- "${command[@]}" >"$work/$image.log" 2>&1 &
}

ready() {
    say "waiting for port $1"
    .venv/bin/python -P - "$1" $! <<'PY'
import os
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

deadline = time.monotonic() + 120
with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
    stub = health_pb2_grpc.HealthStub(channel)
    while True:
        try:
            if stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status == health_pb2.HealthCheckResponse.SERVING:
                break
        except grpc.RpcError as error:
            os.kill(int(sys.argv[2]), 0)  # raises ProcessLookupError if the service has ended
            if time.monotonic() > deadline:
                sys.exit(f"port {sys.argv[1]}: {error.code()}")
        time.sleep(0.2)
PY
}

# The processes that a process has started, directly or indirectly.
below() {
    local pid
    for pid in $(pgrep -P "$1"); do
        echo "$pid"
        below "$pid"
    done
}

# In a cluster, the root file system is read-only, and /data and /tmp are volumes.
wrote_nowhere_else() {
    local root written
    for root in "${roots[@]}"; do
        written=$(find "$root" -xdev \( -path "$root/data" -o -path "$root/tmp" \) -prune -o \
            -type f -user 10001 -newer "$work/began" -print)
        [ -z "$written" ] || { echo "files written outside /data and /tmp: $written"; return 1; }
    done
}

# Ingests a document, and asks a question that it answers.
answers() {
    .venv/bin/fusionkv ingest images "$work/corpus/shelf-01"
    .venv/bin/fusionkv ask images "${asked[0]}" --recipe full_attention | tee "$work/answer"
    grep -qF -- "${asked[1]}" "$work/answer"
}

# The three services of compose.yaml in Docker, from the images that were built.
compose() {
    local gateway began=$SECONDS
    docker info >/dev/null 2>&1 || { say "no Docker daemon runs: compose.yaml was not tried"; return; }
    for image in kvcache worker gateway; do
        buildah push --quiet "localhost/fusionkv-$image" "docker-daemon:localhost/fusionkv-$image:latest" >/dev/null
    done
    composed="docker compose --project-name fusionkv-images"
    docker compose version >/dev/null 2>&1 || composed="docker-compose --project-name fusionkv-images"
    say "starting compose.yaml: $composed up"
    $composed up --detach --no-build 2>"$work/compose.log"
    gateway=$($composed ps --quiet gateway)
    until [ "$(docker inspect --format '{{.State.Health.Status}}' "$gateway")" = healthy ]; do
        [ $SECONDS -lt $((began + 300)) ] || { $composed logs; return 1; }
        sleep 1
    done
    answers
    $composed down --volumes 2>>"$work/compose.log"
    composed=
    say "compose.yaml answered in Docker"
}

base
for image in kvcache worker gateway; do build $image "$@"; done
touch "$work/began"
start kvcache
ready 7070
start worker --volume "$PWD/$MODEL:/models:ro" --env FUSIONKV_WORKER_CACHE=127.0.0.1:7070
ready 7071
start gateway --env FUSIONKV_GATEWAY_WORKERS=127.0.0.1:7071
ready 7072
say "ingesting documents and asking a question"
.venv/bin/python -P -m fusionkv.models.corpus --out "$work/corpus" --stories 1
mapfile -t asked < <(.venv/bin/python -P -c '
import json, sys
first = json.load(open(sys.argv[1]))[0]
print(first["question"], first["answers"][0], sep="\n")' "$work/corpus/questions.json")
echo "${asked[0]} (${asked[1]})"
answers
say "sending SIGTERM"
# To each container's first process, as Kubernetes does, not to those of buildah nor to others on this machine.
services=()
for job in $(jobs -p); do
    for pid in $(below "$job"); do
        [[ $(tr '\0' ' ' <"/proc/$pid/cmdline") != "/usr/bin/tini -- python -P -m fusionkv."* ]] || services+=("$pid")
    done
done
kill -TERM "${services[@]}"
wait
for image in kvcache worker gateway; do grep -h "stopped" "$work/$image.log"; done
wrote_nowhere_else
compose
say "all images were built, started, answered and stopped"
