#!/usr/bin/env bash
# Trains a small language model on this machine's CPU, in minutes.
#
#   bash launch/quickstart.sh [WORKDIR] [--config.seed=1 ...]
#
# Called again with the same folder it goes on from the last checkpoint.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

workdir=runs/quickstart
if [[ $# -gt 0 && $1 != -* ]]; then
  workdir=$(absolute "$1")
  shift
fi

install ''
say "training in $workdir"
exec "$VENV/bin/python" -m jaxrl_sched.train --config=configs/quickstart.py \
  --workdir="$workdir" "$@"
