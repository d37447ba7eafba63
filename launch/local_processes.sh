#!/usr/bin/env bash
# One run of several processes on this machine's CPU, as on a pod of that many hosts.
#
#   bash launch/local_processes.sh N [--devices-each=D] [--module=train] [--logs=DIR]
#     [--restart] -- --config=... --workdir=...
#
# What process i prints begins with [i]; --logs also keeps it in DIR/i.log. Ends with 0
# if all do, else with the exit code of the first that did not; once one has failed, the
# others have 60 s (or --patience=SECONDS) to end too. --restart starts all again as
# launch/supervise.sh does, with train told to end with 75 when it was stopped.
set -euo pipefail
everything=("$@")
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

devices=1 module=train logs='' restart='' patience=60 count=${1:-}
[[ $count =~ ^[1-9][0-9]{0,2}$ ]] || refuse "N '$count': expected how many processes"
shift
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    --devices-each=*) devices=${1#*=} ;;
    --module=*) module=${1#*=} ;;
    --logs=*) logs=$(absolute "${1#*=}") ;;
    --patience=*) patience=${1#*=} ;;
    --restart) restart=yes ;;
    *) refuse "$1: unknown argument; those of $module come after '--'" ;;
  esac
  shift
done
[[ $# -gt 0 ]] || refuse "no '--' with the arguments of $module after it"
shift
[[ $devices =~ ^[1-9][0-9]*$ ]] || refuse "--devices-each=$devices: expected a number"
[[ $patience =~ ^[0-9]+$ ]] || refuse "--patience=$patience: expected seconds"
ready_python ''

here=$PWD
cd "$CALLED_FROM"

if [[ -n $restart ]]; then
  again=()
  for word in "${everything[@]}"; do
    if [[ $word == -- ]]; then break; fi
    if [[ $word != --restart ]]; then again+=("$word"); fi
  done
  if [[ $module == train ]]; then set -- "$@" --stopped-exit-code=75; fi
  export JAXRL_PYTHON=$python
  exec bash "$here/launch/supervise.sh" -- bash "$here/launch/local_processes.sh" \
    "${again[@]}" -- "$@"
fi

if [[ -n $logs ]]; then mkdir -p "$logs"; fi
pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
port=$("$python" -c 'import socket
with socket.socket() as s: s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# Reads on after a Ctrl-C: what a process says while it saves is wanted too.
show() {
  trap '' INT TERM
  local line
  while IFS= read -r line || [[ -n $line ]]; do
    printf '[%s] %s\n' "$1" "$line"
    if [[ -n $logs ]]; then printf '%s\n' "$line" >>"$logs/$1.log"; fi
  done
}

pids=() readers=() codes=()
for ((i = 0; i < count; i++)); do
  mkfifo "$pipes/$i"
  show "$i" <"$pipes/$i" &
  readers[i]=$!
  JAX_COORDINATOR_ADDRESS=127.0.0.1:$port JAX_NUM_PROCESSES=$count JAX_PROCESS_ID=$i \
    JAX_NUM_CPU_DEVICES=$devices JAX_PLATFORMS=cpu PYTHONUNBUFFERED=1 \
    "$python" -m "jaxrl_sched.$module" "$@" >"$pipes/$i" 2>&1 </dev/null &
  pids[i]=$! codes[i]=''
done

# tell SIGNAL: to those that still run.
tell() {
  local i
  for ((i = 0; i < count; i++)); do
    if [[ -z ${codes[i]} ]]; then kill "-$1" "${pids[i]}" 2>/dev/null || true; fi
  done
}
trap 'tell TERM' TERM INT

running=$count first='' deadline=''
while [[ $running -gt 0 ]]; do
  sleep 0.2 || true # a Ctrl-C ends it too
  for ((i = 0; i < count; i++)); do
    if [[ -n ${codes[i]} ]] || kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
    codes[i]=0
    wait "${pids[i]}" || codes[i]=$?
    running=$((running - 1))
    if [[ ${codes[i]} == 0 ]]; then continue; fi
    say "process $i ended with exit code ${codes[i]}"
    first=${first:-${codes[i]}}
    # A process that has stopped and saved (75) is no reason to hurry the others.
    if [[ ${codes[i]} != 75 ]]; then deadline=${deadline:-$((SECONDS + patience))}; fi
  done
  if [[ -n $deadline && $running -gt 0 && $SECONDS -ge $deadline ]]; then
    say "$running still running after $patience s: killed"
    tell KILL
    deadline=$((SECONDS + patience))
  fi
done

# The pipes end with the last process that holds them, which may be a lost grandchild.
for ((i = 0; i < 20; i++)); do
  alive=0
  for reader in "${readers[@]}"; do
    if kill -0 "$reader" 2>/dev/null; then alive=1; fi
  done
  if [[ $alive == 0 ]]; then break; fi
  sleep 0.1
done
kill -KILL "${readers[@]}" 2>/dev/null || true
exit "${first:-0}"
