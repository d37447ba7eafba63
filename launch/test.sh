#!/usr/bin/env bash
# Lint, formatting, and all tests.
#
#   bash launch/test.sh [arguments for pytest, e.g. -k sampler]
#
# PYTHON and JAXRL_VENV say with which interpreter (see common.sh); .ci/run calls this
# once for each that is there.
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
versions="import sys, jax; print('Python', sys.version.split()[0], 'jax', jax.__version__)"
say "tests ($("$VENV/bin/python" -c "$versions"))"
# Each process gets a run of neighbouring tests, which share what they have built; one
# that is done takes over tests of the other.
exec "$VENV/bin/python" -m pytest -n 2 --dist worksteal "$@"
