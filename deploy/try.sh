#!/usr/bin/env bash
# Build and start the mesh, kill a container of every kind, and check that training goes on, also after `down` and `up`,
# and that all groups end with equal weights. Take everything down again, with its volumes. Needs bash, bc, curl,
# python3, and docker with compose.
#
#   deploy/try.sh             with the official images
#   deploy/try.sh local       with the stand-ins of deploy/docker-compose.local.yml
set -euo pipefail
cd "$(dirname "$0")/.."

export COMPOSE_PROJECT_NAME=keepstep-try TRAINERS=4 STEPS=/var/lib/keepstep/checkpoints/steps TORCH_INDEX
TORCH_INDEX=${TORCH_INDEX:-$([ "${1:-}" = local ] && echo https://pypi.org/simple || echo https://download.pytorch.org/whl/cpu)}
files=(-f docker-compose.yml)
[ "${1:-}" = local ] && files+=(-f deploy/docker-compose.local.yml)
if docker compose version >/dev/null 2>&1; then compose=(docker compose "${files[@]}"); else compose=(docker-compose "${files[@]}"); fi

say() { printf '%6.1f s  %s\n' "$(bc <<<"$(date +%s.%N) - $began")" "$*"; }
began=$(date +%s.%N)

# quietly COMMAND...: print its output only if it fails
quietly() {
  local said
  said=$("$@" 2>&1) || { tail -n 30 <<<"$said"; exit 1; }
}

# until_true SECONDS WHAT COMMAND...: wait until COMMAND succeeds
until_true() {
  local limit=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@"; do
    if ((SECONDS >= end)); then
      echo "FAILED: timed out after $limit s: $what" >&2
      "${compose[@]}" ps >&2
      "${compose[@]}" logs --tail 20 >&2
      exit 1
    fi
    sleep 0.2
  done
}

# keepstep COMMAND...: run the command in the container of a relay, with the admin token
keepstep() {
  docker exec -e KEEPSTEP_LIGHTHOUSE=http://lighthouse-1:29510,http://lighthouse-2:29510 -e KEEPSTEP_TOKEN="$admin" \
    "$(container relay)" keepstep "$@"
}
# ask PATH: print the answer of the first lighthouse that answers
ask() {
  local at=http://${PUBLISH:-127.0.0.1}
  curl -sf --max-time 2 -H "Authorization: Bearer $admin" "$at:29510$1" ||
    curl -sf --max-time 2 -H "Authorization: Bearer $admin" "$at:29511$1"
}
read_json() { python3 -c "import json, sys; it = json.load(sys.stdin); print($1)" 2>/dev/null; }

container() { "${compose[@]}" ps -q "$1" | sed -n "${2:-1}p"; }
state() { docker inspect -f '{{.State.Status}} {{if .State.Health}}{{.State.Health.Status}}{{end}} {{.RestartCount}}' "$1"; }

all_healthy() {
  local one
  for one in $("${compose[@]}" ps -aq); do
    case $(docker inspect -f '{{index .Config.Labels "com.docker.compose.service"}}' "$one")/$(state "$one") in
      setup/exited*) ;;
      */'running healthy'*) ;;
      *) return 1 ;;
    esac
  done
}

job() { ask /v1/jobs/default/quorum | read_json "$1"; }
step() { job 'it["step"]' || true; }
steps_beyond() { local now; now=$(step); [ -n "$now" ] && ((now > $1)); }
all_groups_in() { [ "$(job 'len(it["members"])')" = "$TRAINERS" ]; }
leader() { ask /v1/cluster | read_json 'it["leader"].split("//")[1].split(":")[0]'; }
restarted() { [[ $(docker inspect -f '{{.State.Running}} {{.RestartCount}}' "$1") == "true $(($2 + 1))" ]]; }

# Send SIGKILL from outside to the first process of the container. Its restart policy then applies, which it would not
# after `docker kill`.
kill_container() {
  local one before steps pid
  one=$(container "$1" "${2:-1}")
  before=$(docker inspect -f '{{.RestartCount}}' "$one")
  steps=$(step)
  pid=$(docker inspect -f '{{.State.Pid}}' "$one")
  docker run --rm --pid host --user 0 --entrypoint sh keepstep-service -c "kill -9 $pid"
  say "SIGKILL to $1 after step $steps"
  until_true 60 "training goes on beyond step $((steps + 100))" steps_beyond $((steps + 100))
  say "training went on: step $(step)"
  until_true 60 "$1 is started again" restarted "$one" "$before"
  until_true 90 "all is healthy, with $TRAINERS groups in the quorum" healthy_and_whole
  say "$1 is back, all is healthy, all $TRAINERS groups are in: step $(step)"
}
healthy_and_whole() { all_healthy && all_groups_in; }

end() { "${compose[@]}" down --volumes --timeout 5 >/dev/null 2>&1 || true; }
trap end EXIT
end

quietly "${compose[@]}" build
say "built: $(docker images --format '{{.Repository}} {{.Size}}' | grep -E '^keepstep-(service|trainer) ' | sort -u | paste -sd, | sed 's/,/, /g')"

# The script reads its last step from a file.
quietly "${compose[@]}" run --rm --no-deps -T --entrypoint sh trainer -c "echo 1000000000 > $STEPS"
up=("${compose[@]}" up -d --no-build)
began=$(date +%s.%N)
quietly "${up[@]}"
until_true 60 "all is healthy" all_healthy
admin=$(docker exec "$(container relay)" sed -n 's/^admin = //p' /var/lib/keepstep/tokens/tokens)
say "up: all is healthy"
"${compose[@]}" ps
until_true 60 "all groups train" healthy_and_whole

kill_container trainer 2
kill_container relay
kill_container "$(leader)" # the leader
kill_container etcd
kill_container metrics
kill_container prometheus

before=$(step)
quietly "${compose[@]}" down
quietly "${up[@]}"
until_true 90 "all is healthy, with $TRAINERS groups in the quorum" healthy_and_whole
first=$("${compose[@]}" logs --no-color trainer | sed -n 's/.*\] step \([0-9]*\) loss.*/\1/p' | sort -n | sed -n 1p)
((first > before - 200)) || { echo "FAILED: after down and up training began at step $first, not at the last checkpoints"; exit 1; }
say "down after step $before, up again: all $TRAINERS groups are in, and went on at step $first"

keepstep verify-replicas
last=$(($(step) + 2000)) # far enough ahead that all groups read it in time
docker exec "$(container trainer)" sh -c "echo $last > $STEPS.part && mv $STEPS.part $STEPS"
(($(step) < last)) || { echo "FAILED: training passed step $last before all groups had read it"; exit 1; }
ends() { "${compose[@]}" logs --no-color trainer | grep 'test accuracy'; }
finished() { [ "$(ends | wc -l)" = "$TRAINERS" ]; }
until_true 120 "all groups finish" finished
ends
different=$(ends | sed 's/.*\] //' | sort -u | wc -l)
((different == 1)) || { echo "FAILED: the groups ended at different steps or with different weights"; exit 1; }
say "all $TRAINERS groups ended with the same weights"
