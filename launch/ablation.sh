#!/usr/bin/env bash
# What each method gains: eleven variants, three seeds, under an hour on two CPU cores.
#
#   bash launch/ablation.sh [FOLDER] [--seeds=1 --variants=dapo,snoozing]
#
# Writes table.md and figure.png into the folder. Called again it runs what is missing.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

folder=$PWD/runs/ablation
if [[ $# -gt 0 && $1 != -* ]]; then
  folder=$(absolute "$1")
  shift
fi

install ''
"$VENV/bin/python" -c 'import matplotlib' 2>/dev/null || {
  say 'installing matplotlib, for the figure'
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check matplotlib
}
mkdir -p "$folder"
say "running in $folder"
exec "$VENV/bin/python" tests/bench/ablation.py "$folder" --check "$@"
