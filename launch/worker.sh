#!/usr/bin/env bash
# What launch/tpu_vm.sh has done on each worker, and launch/gke_xpk.sh in each pod.
#
#   bash launch/worker.sh setup COMMIT EXTRAS     the environment; takes the place of
#                                                 the tree that is there
#   bash launch/worker.sh start|ensure MODULE ARGUMENTS
#   bash launch/worker.sh stop SECONDS|now
#   bash launch/worker.sh status | outcome | logs LINES [follow]
#   bash launch/worker.sh pod EXTRAS MODULE ARGUMENTS    in a container, to its end
#
# On a TPU VM the tree is ~/jaxrl_sched; beside it, in ~/jaxrl_sched_state, are the
# environment, the log, and the variables that setup was given.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

STATE=$HOME/jaxrl_sched_state
CONSTRAINTS=launch/constraints.txt
UV=0.13.8 # which brings Python: the TPU VM images have 3.10
PYTHON_VERSION=3.11

# TPU VMs are called t1v-...-w-3.
worker=$(hostname)
if [[ $worker =~ -w-([0-9]+)$ ]]; then worker="worker ${BASH_REMATCH[1]}"; fi
tell() { printf '%s: %s\n' "$worker" "$*"; }

is_running() { [[ -f $STATE/lock ]] && ! flock --nonblock "$STATE/lock" true; }

setup() {
  local commit=$1 extras=$2 code
  if is_running; then fail "$worker: a run is going on here: stop it first"; fi
  mkdir -p "$STATE"
  if [[ -f $HOME/jaxrl_sched.env ]]; then
    chmod 600 "$HOME/jaxrl_sched.env"
    mv "$HOME/jaxrl_sched.env" "$STATE/env"
  fi
  if [[ $PWD != "$HOME/jaxrl_sched" ]]; then
    local new=$PWD
    cd "$HOME"
    rm -rf jaxrl_sched
    mv "$new" jaxrl_sched
    cd jaxrl_sched
  fi
  if [[ -z ${JAXRL_PYTHON:-} && -z ${PYTHON:-} ]]; then
    # Ubuntu's newer pip refuses to install for a user unless told so.
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user \
      --disable-pip-version-check "uv==$UV"
    python3 -m uv python install --quiet "$PYTHON_VERSION"
    PYTHON=$(python3 -m uv python find --managed-python "$PYTHON_VERSION")
  fi
  VENV=$STATE/venv
  ready_python "$extras" "$CONSTRAINTS"
  code=$({
    "$python" --version
    "$python" -m pip freeze --disable-pip-version-check --exclude-editable
  } | cksum | cut -d ' ' -f 1)
  printf '%s\n' "$python" >"$STATE/python"
  printf '%s\n' "$commit" >"$STATE/commit"
  tell "set up, commit $commit, environment $code"
}

# Line by line and as they are: nothing in them is run.
read_env() {
  local line
  [[ -f $STATE/env ]] || return 0
  while IFS= read -r line || [[ -n $line ]]; do
    if [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then export "${line?}"; fi
  done <"$STATE/env"
}

# words_of MODULE ARGUMENTS: sets `words`, the command to run.
words_of() {
  words=("$python" -m "jaxrl_sched.$1" "${@:2}")
  if [[ $1 == train ]]; then words+=(--stopped-exit-code=75); fi
}

start() {
  [[ -f $STATE/python ]] || fail "$worker: not set up"
  if is_running; then fail "$worker: a run is going on here already"; fi
  python=$(<"$STATE/python")
  read_env
  export JAXRL_PYTHON=$python
  words_of "$@"
  rm -f "$STATE/asked" "$STATE/exit" "$STATE/pid"
  # A session of its own, so that it outlives this connection.
  setsid bash launch/supervise.sh --state="$STATE" -- "${words[@]}" \
    >>"$STATE/log" 2>&1 </dev/null &
  local i
  for ((i = 0; i < 50; i++)); do
    if [[ -f $STATE/pid ]]; then
      tell started
      return
    fi
    sleep 0.1
  done
  fail "$worker: it did not start: $(tail -n 1 "$STATE/log")"
}

ensure() {
  if is_running; then tell 'runs already'; else start "$@"; fi
}

stop() {
  local limit=$1 end
  if ! is_running; then
    tell 'nothing was running'
    return
  fi
  touch "$STATE/asked"
  if [[ $limit == now ]]; then
    kill -KILL -- "-$(<"$STATE/pid")" || true
    tell killed
    return
  fi
  kill -TERM "$(<"$STATE/pid")" || true
  end=$((SECONDS + limit))
  while is_running; do
    [[ $SECONDS -lt $end ]] || fail "$worker: still running after $limit s"
    sleep 0.2
  done
  tell "stopped, exit code $(cat "$STATE/exit" 2>/dev/null || echo unknown)"
}

# running | ended-CODE | stopped (was asked to) | idle (never started, or cut off)
outcome() {
  if is_running; then
    echo running
    return
  fi
  local code=''
  if [[ -f $STATE/exit ]]; then code=$(<"$STATE/exit"); fi
  if [[ $code != [02] && -f $STATE/asked ]]; then
    echo stopped
  elif [[ -n $code ]]; then
    echo "ended-$code"
  else
    echo idle
  fi
}

status() {
  tell "$(outcome), commit $(cat "$STATE/commit" 2>/dev/null || echo unknown):" \
    "$(tail -n 1 "$STATE/log" 2>/dev/null || true)"
}

logs() {
  local line
  # `tail` outlives a cut connection until the log's next line, and no longer.
  tail -n "$1" ${2:+--follow=name --retry} "$STATE/log" |
    while IFS= read -r line; do tell "$line" || break; done
}

pod() {
  local extras=$1
  shift
  PYTHON=${PYTHON:-python3}
  ready_python "$extras" "$CONSTRAINTS"
  export JAXRL_PYTHON=$python
  words_of "$@"
  exec bash launch/supervise.sh -- "${words[@]}"
}

main() {
  local command=${1:-}
  shift || true
  case $command in
    setup) setup "$@" ;;
    start) start "$@" ;;
    ensure) ensure "$@" ;;
    stop) stop "$@" ;;
    status) status ;;
    outcome) printf 'outcome=%s\n' "$(outcome)" ;;
    logs) logs "$@" ;;
    pod) pod "$@" ;;
    *) refuse "'$command': expected a command; see the top of launch/worker.sh" ;;
  esac
}

# In one line, which bash has read before setup moves this file.
main "$@"; exit
