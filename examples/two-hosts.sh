#!/bin/sh
# Runs a job on two containers, node-1 and node-2, waits for both and shows the log of node-1:
#   two-hosts.sh IMAGE WORD OF train...
# The containers share this folder as /src. Options of `docker run` more: DOCKER_OPTIONS="--gpus all".
set -eu
image=$1
shift
network=two-hosts-$$
docker network create "$network" >/dev/null
containers=""
# Only those that were started here: another job may have containers of these names.
# shellcheck disable=SC2086  # identifiers are words
trap '[ -z "$containers" ] || docker rm --force $containers >/dev/null; docker network rm "$network" >/dev/null' EXIT
for host in node-1 node-2; do
    # shellcheck disable=SC2086  # options are words
    container=$(docker create --name "$host" --hostname "$host" --network "$network" --user "$(id -u):$(id -g)" \
        --shm-size 1g --volume "$PWD:/src" --workdir /src --env TRAINWORKS_HOSTS=node-1,node-2 \
        --env TRAINWORKS_CHECKPOINT_DIRECTORY=/src/checkpoints ${DOCKER_OPTIONS:-} "$image" "$@")
    containers="$containers $container"
done
# shellcheck disable=SC2086
docker start $containers >/dev/null
# shellcheck disable=SC2086
statuses=$(docker wait $containers)
docker logs node-1
echo "exit status of node-1 and node-2: $(echo "$statuses" | tr '\n' ' ')"
[ "$(echo "$statuses" | sort --unique)" = 0 ]
