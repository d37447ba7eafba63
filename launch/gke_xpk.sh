#!/usr/bin/env bash
# A run as an XPK workload on TPUs of a GKE cluster.
#
#   bash launch/gke_xpk.sh create NAME --tpu-type=v5litepod-16 [--num-slices=1]
#     [--docker-image=IMAGE | --base-docker-image=python:3.11 --extras=math,wandb]
#     [--priority=medium] [--max-restarts=10] [--env-file=FILE] [--module=train]
#     -- --config=... --workdir=gs://...
#   bash launch/gke_xpk.sh list
#   bash launch/gke_xpk.sh logs NAME [--lines=100] [--no-follow]
#   bash launch/gke_xpk.sh delete NAME
#
# Of all: --cluster (or XPK_CLUSTER), --zone (or TPU_ZONE), --project (or TPU_PROJECT);
# without the last two XPK takes those of gcloud. --xpk-flag=FLAG gives XPK any other
# flag, as often as needed. Without --docker-image this tree is put into the base image,
# and every pod installs the package as it starts; an image of your own has the package
# installed for its python3, and this tree as its working folder.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

place='--cluster --zone --project --xpk-flag'
action=${1:-}
shift || true
case $action in
  create) options="$place --tpu-type --num-slices --docker-image --base-docker-image
    --extras --priority --max-restarts --env-file --module" ;;
  logs) options="$place --lines --no-follow" ;;
  list | delete) options=$place ;;
  *) refuse "'$action': expected create, list, logs or delete" ;;
esac
name=''
if [[ $action != list ]]; then
  name=${1:-}
  check_name "$name" 40 # XPK's limit
  shift
fi

cluster=${XPK_CLUSTER:-} zone=${TPU_ZONE:-} project=${TPU_PROJECT:-} type='' slices=1
image='' base='' extras='' priority=medium restarts=10 env_file='' module=train lines=100
follow=--follow flags=()

while [[ $# -gt 0 && $1 != -- ]]; do
  key=${1%%=*}
  case " ${options//$'\n'/ } " in
    *" $key "*) ;;
    *) refuse "$1: unknown to $action; expected of: $(echo "$options" | xargs)" ;;
  esac
  if [[ $key == --no-follow ]]; then
    [[ $1 == "$key" ]] || refuse "$1: $key takes no value"
    follow=''
    shift
    continue
  fi
  if [[ $1 != *=* ]]; then
    [[ $# -gt 1 ]] || refuse "$key: expected a value"
    shift
  fi
  value=${1#"$key="}
  [[ -n $value ]] || refuse "$key: expected a value"
  shift
  case $key in
    --cluster) cluster=$value ;;
    --zone) zone=$value ;;
    --project) project=$value ;;
    --xpk-flag) flags+=("$value") ;;
    --tpu-type) type=$value ;;
    --num-slices) slices=$value ;;
    --docker-image) image=$value ;;
    --base-docker-image) base=$value ;;
    --extras) extras=$value ;;
    --priority) priority=$value ;;
    --max-restarts) restarts=$value ;;
    --env-file) env_file=$(absolute "$value") ;;
    --module) module=$value ;;
    --lines) lines=$value ;;
  esac
done
if [[ $# -gt 0 ]]; then
  [[ $action == create ]] || refuse "'--': $action takes nothing after it"
  shift
fi

check() {
  [[ -n $cluster ]] || refuse 'no cluster: give --cluster=..., or set XPK_CLUSTER'
  [[ $lines =~ ^[0-9]+$ ]] || refuse "--lines=$lines: expected a number"
  if [[ $action == create ]]; then
    [[ -n $type ]] || refuse 'no --tpu-type=v5litepod-16: expected the kind of slice'
    [[ $slices =~ ^[1-9][0-9]*$ ]] || refuse "--num-slices=$slices: expected a number"
    [[ $restarts =~ ^[0-9]+$ ]] || refuse "--max-restarts=$restarts: expected a number"
    [[ -z $image || -z $base$extras ]] ||
      refuse '--docker-image excludes --base-docker-image and --extras'
    [[ -z $extras || $extras =~ ^[a-z]+(,[a-z]+)*$ ]] ||
      refuse "--extras=$extras: expected names as in math,wandb"
    if [[ -n $env_file ]]; then check_env_file "$env_file"; fi
    check_module "$module" "$@"
    # XPK writes the command into a line of YAML.
    [[ $* != *[[:cntrl:]]* ]] || refuse "a line break or tab after '--': expected none"
  fi
  command -v xpk >/dev/null || fail 'no xpk on PATH: pip install xpk'
}

workload() {
  xpk workload "$@" --cluster="$cluster" ${zone:+--zone="$zone"} \
    ${project:+--project="$project"} ${flags[@]+"${flags[@]}"}
}

create() {
  local words=(bash launch/worker.sh pod "[tpu,gcs${extras:+,$extras}]" "$module" "$@")
  local source=(--base-docker-image="${base:-python:3.11}" --script-dir="$PWD")
  if [[ -n $image ]]; then
    words=(env JAXRL_PYTHON=python3 "${words[@]}")
    source=(--docker-image="$image")
  fi
  # 75: stopped and saved, as after a preemption. What fails starts again in its pod
  # first, by launch/supervise.sh. `exec`, as XPK passes SIGTERM on to one process.
  workload create --workload="$name" --tpu-type="$type" --num-slices="$slices" \
    "${source[@]}" --priority="$priority" --max-restarts="$restarts" \
    --restart-on-exit-codes=75 --termination-grace-period-seconds=300 \
    ${env_file:+--env-file="$env_file"} --command="exec $(quoted "${words[@]}")"
}

# `list` also leaves kubectl with the cluster's credentials.
logs() {
  workload list --filter-by-job="$name"
  kubectl logs --selector="xpk.google.com/workload=$name" --prefix --tail="$lines" \
    --max-log-requests=1000 ${follow:+"$follow"}
}

check "$@"
case $action in
  create) create "$@" ;;
  list) workload list ;;
  logs) logs ;;
  delete) workload delete --workload="$name" ;;
esac
