# Sourced by the scripts beside it. Goes to the root of the repository, and gives
# `install`, which makes a virtual environment where there is none.
# shellcheck shell=bash
#
# PYTHON       the interpreter to make the environment with (3.11 or later)
# JAXRL_VENV   where the environment is, if not in .venv

CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# A path as the caller meant it: relative ones start from the folder they called from.
absolute() {
  case $1 in
    /* | *://*) printf '%s\n' "$1" ;;
    *) printf '%s\n' "$CALLED_FROM/$1" ;;
  esac
}

VENV=$PWD/.venv
if [[ -n ${JAXRL_VENV:-} ]]; then VENV=$(absolute "$JAXRL_VENV"); fi

new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or later"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail 'no Python 3.11 or later found: install one, or name it with PYTHON=...'
}

make_venv() {
  # Also mends one whose making was interrupted.
  if [[ -x $VENV/bin/python ]] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python=$(find_python)
  say "making a virtual environment in $VENV"
  "$python" -m venv "$VENV" || fail "$python -m venv failed (on Debian and Ubuntu it" \
    'needs the package python3-venv)'
}

# install EXTRAS: the package, editable, with what it needs, e.g. install '[test]'.
# Done again only when pyproject.toml or the place has changed since it last ended well.
install() {
  local stamp=$VENV/.jaxrl_sched-installed$1 wanted
  wanted="$PWD $(cksum <pyproject.toml)"
  if [[ -x $VENV/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    return
  fi
  make_venv
  new_enough "$VENV/bin/python" ||
    fail "$VENV has a Python older than 3.11: remove it, or set JAXRL_VENV"
  say "installing jaxrl_sched$1 and what it needs into $VENV (minutes, this once)"
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check \
    --editable ".$1" || fail 'the installation failed: see the lines above'
  printf '%s\n' "$wanted" >"$stamp"
}
