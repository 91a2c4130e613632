#!/bin/sh
# Runs a job on two containers, node-1 and node-2, waits for both and shows the log of node-1:
#   two-hosts.sh IMAGE WORD OF train...
# The containers share this folder as /src. Options of `docker run` more: DOCKER_OPTIONS="--gpus all".
set -eu
image=$1
shift
network=two-hosts-$$
docker network create "$network" >/dev/null
trap 'docker rm --force node-1 node-2 >/dev/null 2>&1; docker network rm "$network" >/dev/null' EXIT
for host in node-1 node-2; do
    # shellcheck disable=SC2086  # options are words
    docker run --detach --name "$host" --hostname "$host" --network "$network" --user "$(id -u)" \
        --shm-size 1g --volume "$PWD:/src" --workdir /src --env TRAINWORKS_HOSTS=node-1,node-2 \
        --env TRAINWORKS_CHECKPOINT_DIRECTORY=/src/checkpoints ${DOCKER_OPTIONS:-} "$image" "$@" >/dev/null
done
statuses=$(docker wait node-1 node-2)
docker logs node-1
echo "exit status of node-1 and node-2: $(echo "$statuses" | tr '\n' ' ')"
[ "$(echo "$statuses" | sort --unique)" = 0 ]
