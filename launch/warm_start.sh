#!/usr/bin/env bash
# Makes configs/quickstart_model again, from random weights, by the quickstart's own
# learner: reference solutions that think first, then a mix in which most do not.
#
#   bash launch/warm_start.sh [WORKDIR]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

runs=$(absolute "${1:-runs/warm_start}")
install ''

# learn VARIANT FOLDER [ARGUMENTS]: one run, then its last step as a folder.
learn() {
  local variant=$1 folder=$2
  shift 2
  say "$variant"
  "$VENV/bin/python" -m jaxrl_sched.train --config="configs/quickstart.py:$variant" \
    --workdir="$runs/$variant" "$@"
  rm -rf "$folder"
  "$VENV/bin/python" -m jaxrl_sched.export --workdir="$runs/$variant" --out="$folder" \
    --dtype=float16
}

learn think "$runs/think_model"
learn mix "$runs/mix_model" --config.model.path="$runs/think_model"
rm -rf configs/quickstart_model
mv "$runs/mix_model" configs/quickstart_model
say 'made configs/quickstart_model'
