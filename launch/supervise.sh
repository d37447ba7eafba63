#!/usr/bin/env bash
# Runs a command until its work is complete: what was stopped or has failed starts again.
#
#   bash launch/supervise.sh [--failures=5] [--pause=10] [--state=DIR] -- COMMAND ...
#
# By the command's exit code:
#   0, 2        complete, or bad input: ends with it, and so it does with 126 and 127,
#               a command that cannot be run
#   75          stopped and saved (train's --stopped-exit-code=75): starts again
#   any other   failed: starts again after a pause that doubles each time, unless it has
#               failed --failures times without a new checkpoint in its --workdir
#
# SIGTERM and SIGINT are passed on as SIGTERM; once the command has ended, so does this,
# with its exit code. --state keeps pid, exit (the exit code) and a lock in a folder.
# JAXRL_PYTHON is what looks for checkpoints, python3 if it is not set.
set -uo pipefail

failures=5 pause=10 state=''
say() { printf '== %s supervise: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*" >&2; }
refuse() { printf 'error: %s\n' "$*" >&2; exit 2; }

# whole OPTION NUMBER LEAST
whole() {
  [[ $2 =~ ^[0-9]{1,6}$ && $2 -ge $3 ]] || refuse "$1=$2: expected a whole number >= $3"
}

while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    --failures=*) failures=${1#*=}; whole --failures "$failures" 1 ;;
    --pause=*) pause=${1#*=}; whole --pause "$pause" 0 ;;
    --state=*) state=${1#*=} ;;
    *) refuse "$1: unknown argument; expected [--failures=5] [--pause=10]" \
      '[--state=DIR] -- COMMAND ...' ;;
  esac
  shift
done
[[ $# -gt 1 ]] || refuse "no command after '--'"
shift

workdir='' before=''
for word; do
  if [[ $before == --workdir ]]; then workdir=$word; fi
  if [[ $word == --workdir=* ]]; then workdir=${word#*=}; fi
  before=$word
done

if [[ -n $state ]]; then
  mkdir -p "$state"
  exec 9>"$state/lock"
  flock --nonblock 9 || refuse "--state=$state: something is running there already"
  rm -f "$state/exit"
  printf '%s\n' $$ >"$state/pid"
fi

finish() {
  if [[ -n $state ]]; then printf '%s\n' "$1" >"$state/exit"; fi
  exit "$1"
}

# The step of the newest checkpoint, by Python since the workdir may be in a bucket;
# nothing where there is none, or none can be seen.
newest() {
  [[ -z $workdir ]] || "${JAXRL_PYTHON:-python3}" -c '
import sys
from etils import epath
found = (epath.Path(sys.argv[1]) / "checkpoints").iterdir()
print(max(int(path.name) for path in found if path.name.isdigit()))
' "$workdir" 2>/dev/null
}

stopping='' child='' heard=''
# shellcheck disable=SC2317,SC2329  # called by the trap
hear() {
  stopping=yes heard=yes
  if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null; fi
}
trap hear TERM INT

# What `wait` says of a child counts only where no signal cut the waiting short.
wait_for_child() {
  heard=yes
  while [[ -n $heard ]]; do
    heard='' code=0
    wait "$child" || code=$?
  done
  child=''
}

failed=0 reached=''
while [[ -z $stopping ]]; do
  "$@" 9>&- &
  child=$!
  if [[ -n $stopping ]]; then kill -TERM "$child" 2>/dev/null; fi
  wait_for_child
  case $code in
    0 | 2 | 126 | 127) finish "$code" ;;
  esac
  [[ -z $stopping ]] || finish "$code"
  wait_s=$pause
  if [[ $code == 75 ]]; then
    say "stopped and saved; starting again in $wait_s s"
  else
    step=$(newest)
    if [[ $step != "$reached" ]]; then reached=$step failed=0; fi
    failed=$((failed + 1))
    if [[ $failed -ge $failures ]]; then
      say "exit code $code, $failed times without a new checkpoint: giving up"
      finish "$code"
    fi
    for ((i = 1; i < failed && wait_s < 300; i++)); do wait_s=$((2 * wait_s)); done
    say "exit code $code, failure $failed of $failures at step ${step:-0}; starting" \
      "again in $wait_s s"
  fi
  sleep "$wait_s" 9>&- &
  child=$!
  if [[ -n $stopping ]]; then kill -TERM "$child" 2>/dev/null; fi
  wait_for_child
done
finish 75 # asked to stop in a pause: saved, as far as it goes, and not complete
