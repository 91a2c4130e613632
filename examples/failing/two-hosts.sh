#!/bin/sh
# Runs train.py on two containers, node-1 and node-2, and waits for both: two-hosts.sh IMAGE
set -eu
cd "$(dirname "$0")"
docker network create failing
for host in node-1 node-2; do
    docker run --detach --name "$host" --hostname "$host" --network failing -v "$PWD:/src" -w /src \
        --env TRAINWORKS_HOSTS=node-1,node-2 "$1" \
        train --mode torch_distributed --processes-per-host 1 -- train.py
done
docker wait node-1 node-2
