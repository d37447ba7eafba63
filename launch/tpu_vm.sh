#!/usr/bin/env bash
# A TPU slice as a queued resource, and a run on all of its workers.
#
#   bash launch/tpu_vm.sh create NAME --accelerator-type=v5litepod-16 [--spot] [--wait]
#   bash launch/tpu_vm.sh setup NAME [--env-file=FILE] [--extras=math,wandb]
#   bash launch/tpu_vm.sh run NAME [--module=train] -- --config=... --workdir=gs://...
#   bash launch/tpu_vm.sh run NAME --keep [of create and setup] -- --config=... ...
#   bash launch/tpu_vm.sh logs NAME [--worker=all] [--lines=100] [--no-follow]
#   bash launch/tpu_vm.sh status NAME
#   bash launch/tpu_vm.sh stop NAME [--timeout=600 | --kill] [--delete]
#
# Of all: --zone (or TPU_ZONE), --project (or TPU_PROJECT), else what gcloud is
# configured with; --internal-ip where the workers have no other address. Of create:
# --type and --topology instead of --accelerator-type, --runtime-version,
# --service-account, and --create-flag=FLAG for any other of gcloud's, as often as needed.
# TPU_POLL_SECONDS (30) is how often a state is asked for that is waited for.
# launch/tpu_vm.md tells the whole way, and what it costs.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

place='--zone --project --internal-ip'
shape='--accelerator-type --type --topology --runtime-version --service-account --spot
  --create-flag'
action=${1:-}
case $action in
  create) options="$place $shape --wait" ;;
  setup) options="$place --env-file --extras" ;;
  run) options="$place $shape --env-file --extras --module --keep" ;;
  logs) options="$place --worker --lines --no-follow" ;;
  status) options=$place ;;
  stop) options="$place --timeout --kill --delete" ;;
  *) refuse "'$action': expected create, setup, run, logs, status or stop" ;;
esac
name=${2:-}
check_name "$name" 63
shift 2

zone=${TPU_ZONE:-} project=${TPU_PROJECT:-} accelerator='' type='' topology=''
runtime='' account='' env_file='' extras='' module=train worker=0 lines=100 timeout=600
spot='' wait='' keep='' follow=follow kill='' delete='' internal='' flags=() train=()
poll=${TPU_POLL_SECONDS:-30}

parse() {
  local key value
  while [[ $# -gt 0 ]]; do
    key=${1%%=*}
    case " ${options//$'\n'/ } " in
      *" $key "*) ;;
      *) refuse "$1: unknown to $action; expected of: $(echo "$options" | xargs)" ;;
    esac
    case $key in
      --spot | --wait | --keep | --no-follow | --kill | --delete | --internal-ip)
        [[ $1 == "$key" ]] || refuse "$1: $key takes no value"
        value=$key
        ;;
      *)
        if [[ $1 != *=* ]]; then
          [[ $# -gt 1 ]] || refuse "$key: expected a value"
          shift
        fi
        value=${1#"$key="}
        [[ -n $value ]] || refuse "$key: expected a value"
        ;;
    esac
    shift
    case $key in
      --zone) zone=$value ;;
      --project) project=$value ;;
      --internal-ip) internal=$value ;;
      --accelerator-type) accelerator=$value ;;
      --type) type=$value ;;
      --topology) topology=$value ;;
      --runtime-version) runtime=$value ;;
      --service-account) account=$value ;;
      --create-flag) flags+=("$value") ;;
      --spot) spot=$value ;;
      --wait) wait=$value ;;
      --env-file) env_file=$(absolute "$value") ;;
      --extras) extras=$value ;;
      --module) module=$value ;;
      --keep) keep=$value ;;
      --worker) worker=$value ;;
      --lines) lines=$value ;;
      --no-follow) follow='' ;;
      --timeout) timeout=$value ;;
      --kill) kill=$value ;;
      --delete) delete=$value ;;
    esac
  done
}

# All that can be known to be wrong before anything costs money.
check() {
  [[ $worker =~ ^(all|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)$ ]] ||
    refuse "--worker=$worker: expected all, or numbers as in 0,2-3"
  [[ $lines =~ ^[0-9]+$ ]] || refuse "--lines=$lines: expected a number"
  [[ $timeout =~ ^[0-9]+$ ]] || refuse "--timeout=$timeout: expected seconds"
  [[ -z $extras || $extras =~ ^[a-z]+(,[a-z]+)*$ ]] ||
    refuse "--extras=$extras: expected names as in math,wandb"
  if [[ -n $env_file ]]; then check_env_file "$env_file"; fi
  if [[ $action == run ]]; then
    check_module "$module" ${train[@]+"${train[@]}"}
    [[ -z $config_file ]] || git cat-file -e "HEAD:$config_file" 2>/dev/null ||
      refuse "--config=$config_file: not in the last commit, which is what workers get"
  fi
  if [[ $action == create || -n $keep ]]; then
    if [[ -n $accelerator ]]; then
      [[ -z $type$topology ]] ||
        refuse '--accelerator-type excludes --type and --topology: expected one way'
    else
      [[ -n $type && -n $topology ]] || refuse 'no --accelerator-type=v5litepod-16 (or' \
        '--type and --topology): expected the kind and size of the slice'
    fi
  elif [[ $action == run ]]; then
    [[ -z $accelerator$type$topology$runtime$account$spot$env_file$extras${flags[*]-} ]] ||
      refuse 'options of create and setup: expected only with --keep'
  fi
  command -v gcloud >/dev/null || fail 'no gcloud on PATH: install the Google Cloud CLI'
  zone=${zone:-$(gcloud config get-value compute/zone 2>/dev/null || true)}
  project=${project:-$(gcloud config get-value core/project 2>/dev/null || true)}
  [[ -n $zone ]] || refuse 'no zone: give --zone=..., or set TPU_ZONE'
  [[ -n $project ]] || refuse 'no project: give --project=..., or set TPU_PROJECT'
}

tpus() { gcloud compute tpus "$@" --zone="$zone" --project="$project" --quiet; }

# on WORKERS WORDS: runs the words in bash on workers, in their tree.
on() {
  tpus tpu-vm ssh "$name" --worker="$1" ${internal:+"$internal"} \
    --command="cd jaxrl_sched && $(quoted "${@:2}")"
}

# Of the queued resource: its state, or ABSENT; fails where that cannot be learnt.
state() {
  local answer
  if answer=$(tpus queued-resources describe "$name" --format='value(state.state)' 2>&1)
  then
    printf '%s\n' "$answer" | tail -n 1
  elif [[ $answer == *NOT_FOUND* || $answer == *'not found'* ]]; then
    echo ABSENT
  else
    printf '%s\n' "$answer" >&2
    return 1
  fi
}

need_active() {
  local now
  now=$(state) || fail "$name: its state cannot be learnt: see the lines above"
  [[ $now == ACTIVE ]] || fail "$name: $now in $zone, expected ACTIVE; see status"
}

create() {
  local kind=${accelerator:-$type}
  if [[ -z $runtime ]]; then # cloud.google.com/tpu/docs/runtimes
    case $kind in
      v5lite*) runtime=v2-alpha-tpuv5-lite ;;
      v5p*) runtime=v2-alpha-tpuv5 ;;
      v6e*) runtime=v2-alpha-tpuv6e ;;
      *) runtime=tpu-ubuntu2204-base ;;
    esac
  fi
  tpus queued-resources create "$name" --node-id="$name" \
    ${accelerator:+--accelerator-type="$accelerator"} \
    ${type:+--type="$type" --topology="$topology"} --runtime-version="$runtime" \
    ${spot:+--spot} ${account:+--service-account="$account"} \
    ${internal:+--internal-ips} ${flags[@]+"${flags[@]}"}
  say "$name is queued. It is billed from when it is ACTIVE until it is deleted:" \
    "bash launch/tpu_vm.sh stop $name --delete"
}

wait_until_active() {
  local now before=''
  while :; do
    now=$(state) || now=UNKNOWN
    if [[ $now != "$before" ]]; then say "$name: $now"; fi
    before=$now
    case $now in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING) fail "$name: $now; see status" ;;
    esac
    sleep "$poll"
  done
}

# The last commit goes to every worker, which then makes its environment from it.
setup() {
  local commit sent answer codes
  commit=$(git rev-parse --verify --quiet HEAD) || fail "$PWD: not a git repository"
  if [[ -n $(git status --porcelain) ]]; then
    say 'sending the last commit: what is changed since stays here'
  fi
  git archive --format=tar.gz --output="$scratch/jaxrl_sched.tar.gz" HEAD || return
  sent=("$scratch/jaxrl_sched.tar.gz")
  if [[ -n $env_file ]]; then
    (umask 077 && cat "$env_file" >"$scratch/jaxrl_sched.env")
    sent+=("$scratch/jaxrl_sched.env")
  fi
  tpus tpu-vm scp "${sent[@]}" "$name:" --worker=all ${internal:+"$internal"} || return
  say 'installing on all workers (minutes, the first time)'
  answer=$(tpus tpu-vm ssh "$name" --worker=all ${internal:+"$internal"} --command="
rm -rf jaxrl_sched.new && mkdir jaxrl_sched.new &&
tar -xzf jaxrl_sched.tar.gz -C jaxrl_sched.new && rm jaxrl_sched.tar.gz &&
bash jaxrl_sched.new/launch/worker.sh setup ${commit:0:12} '[tpu,gcs${extras:+,$extras}]'" |
    tee /dev/stderr) || return
  codes=$(grep -o 'environment [0-9]*' <<<"$answer" | sort -u | wc -l)
  [[ $codes -eq 1 ]] || fail "$name: the workers' environments differ: see above"
}

# Until the run is complete: waits for the slice, makes it again when it was preempted,
# and starts the run again on workers that came back without it.
keep() {
  local now before='' tries=0
  while :; do
    now=$(state) || now=UNKNOWN
    if [[ $now != "$before" ]]; then say "$name: $now"; fi
    before=$now
    case $now in
      ABSENT) create || fail "$name: it cannot be created: see the lines above" ;;
      SUSPENDED) delete || true ;; # preempted; ABSENT is next
      FAILED) fail "$name: FAILED; see status" ;;
      ACTIVE)
        if keep_running; then
          tries=0
        else
          tries=$((tries + 1))
          [[ $tries -lt 10 ]] || fail "$name: no answer in 10 tries; it is still billed"
        fi
        ;;
    esac
    sleep "$poll"
  done
}

# Once round: fails where the workers cannot be asked; ends all when the run is over.
keep_running() {
  local found
  if ! found=$(on all bash launch/worker.sh outcome); then # new, as a rule
    setup || return
    found='outcome=idle'
  fi
  case $found$'\n' in
    *=ended-2$'\n'*) over 2 ;;
    *=stopped$'\n'*)
      [[ $found == *=running* ]] || over 75
      return 0
      ;;
    # A worker that went down, for a repair say, and is back without the run.
    *=idle$'\n'* | *=ended-75$'\n'*) ;;
    *=running$'\n'*) return 0 ;;
    *)
      found=$(grep -o 'ended-[1-9][0-9]*' <<<"$found" | head -n 1) || over 0
      over "${found#ended-}"
      ;;
  esac
  on all bash launch/worker.sh ensure "$module" "${train[@]}"
}

over() {
  case $1 in
    0) say "complete. $name is still billed: stop it with --delete" ;;
    *) say "the run has ended with $1. $name is still billed; see logs" ;;
  esac
  exit "$1"
}

run() {
  if [[ -n $keep ]]; then keep; fi
  need_active
  on all bash launch/worker.sh start "$module" "${train[@]}"
  say "runs on its own now; see: bash launch/tpu_vm.sh logs $name"
}

status() {
  local now
  now=$(state) || fail "$name: its state cannot be learnt: see the lines above"
  say "$name in $zone: $now"
  case $now in
    ACTIVE) on all bash launch/worker.sh status ;;
    ABSENT) ;;
    *) tpus queued-resources describe "$name" --format='yaml(state)' ;;
  esac
}

delete() { tpus queued-resources delete "$name" --force --async; }

stop() {
  local now limit=$timeout
  if [[ -n $kill ]]; then limit=now; fi
  now=$(state) || fail "$name: its state cannot be learnt: see the lines above"
  if [[ $now == ACTIVE ]]; then
    on all bash launch/worker.sh stop "$limit" ||
      fail "$name: not all workers have stopped; it is still billed. Wait, or --kill"
  else
    say "$name in $zone: $now, nothing to stop"
  fi
  if [[ -n $delete && $now != ABSENT ]]; then
    delete
    say "$name: being deleted; what lies on its disks goes with it"
  elif [[ $now == ACTIVE ]]; then
    say "$name is still billed: --delete ends that"
  fi
}

own=()
while [[ $# -gt 0 && $1 != -- ]]; do
  own+=("$1")
  shift
done
if [[ $# -gt 0 ]]; then
  [[ $action == run ]] || refuse "'--': $action takes nothing after it"
  shift
  train=("$@")
fi
parse ${own[@]+"${own[@]}"}
check
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
case $action in
  create)
    create
    if [[ -n $wait ]]; then wait_until_active; fi
    ;;
  setup)
    need_active
    setup || fail "$name: not set up: see the lines above"
    ;;
  run) run ;;
  logs) on "$worker" bash launch/worker.sh logs "$lines" ${follow:+follow} ;;
  status) status ;;
  stop) stop ;;
esac
