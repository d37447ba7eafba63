#!/usr/bin/env bash
# Lint, formatting, and all tests.
#
#   bash launch/test.sh [arguments for pytest, e.g. -k sampler]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install '[test]'
say 'lint'
"$VENV/bin/python" -m ruff check .
say 'formatting'
"$VENV/bin/python" -m ruff format --check .
say 'the model that some tests use'
"$VENV/bin/python" launch/smollm2.py
say 'tests'
# Each process gets a run of neighbouring tests, which share what they have built; one
# that is done takes over tests of the other.
exec "$VENV/bin/python" -m pytest -n 2 --dist worksteal "$@"
