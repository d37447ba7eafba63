# Sourced by the scripts beside it. Goes to the root of the repository, and gives
# `install`, which makes a virtual environment where there is none.
# shellcheck shell=bash
#
# PYTHON         the interpreter to make the environment with (3.11 or later)
# JAXRL_VENV     where the environment is, if not in .venv
# JAXRL_PYTHON   an interpreter that has the package already: some of the scripts then
#                install nothing (see `ready_python`)

CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
refuse() { printf 'error: %s\n' "$*" >&2; exit 2; } # bad input, as in Python

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

# install EXTRAS [CONSTRAINTS]: the package, editable, with what it needs, e.g.
# install '[test]'; of the versions that a file of constraints names, if one is given.
# Done again only when pyproject.toml, that file or the place has changed since it last
# ended well.
install() {
  local stamp=$VENV/.jaxrl_sched-installed$1 constraints=${2:-} wanted
  wanted="$PWD $(cksum <pyproject.toml)"
  if [[ -n $constraints ]]; then wanted+=" $(cksum <"$constraints")"; fi
  if [[ -x $VENV/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    return
  fi
  make_venv
  new_enough "$VENV/bin/python" ||
    fail "$VENV has a Python older than 3.11: remove it, or set JAXRL_VENV"
  say "installing jaxrl_sched$1 and what it needs into $VENV (minutes, this once)"
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check \
    ${constraints:+--constraint "$constraints"} --editable ".$1" ||
    fail 'the installation failed: see the lines above'
  printf '%s\n' "$wanted" >"$stamp"
}

# ready_python [EXTRAS [CONSTRAINTS]]: sets `python` to an interpreter with the package.
ready_python() {
  python=${JAXRL_PYTHON:-}
  if [[ -z $python ]]; then
    install "${1:-}" "${2:-}"
    # shellcheck disable=SC2034  # the sourcing script's
    python=$VENV/bin/python
  fi
}

# check_name NAME LENGTH: what Google Cloud takes as a name, and no option by mistake.
check_name() {
  [[ $1 =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ && ${#1} -le $2 ]] || refuse "NAME '$1':" \
    "expected up to $2 lower-case letters, digits and dashes, beginning with a letter"
}

# check_module MODULE ARGUMENTS: what a command needs to run on machines that share
# nothing but their storage. Sets config_file, where one of this tree is named.
check_module() {
  local module=$1 workdir='' config='' before=''
  config_file=''
  shift
  case $module in
    train | evaluate | stratify) ;;
    *) refuse "--module=$module: expected train, evaluate or stratify" ;;
  esac
  local word
  for word; do
    case $before in --workdir | --config) word=$before=$word ;; esac
    case $word in
      --workdir=*) workdir=${word#*=} ;;
      --config=*) config=${word#*=} ;;
    esac
    before=$word
  done
  case $workdir in
    *://* | /*) ;;
    '') refuse "no --workdir=... after '--': expected gs://BUCKET/FOLDER" ;;
    *) refuse "--workdir=$workdir: expected gs://BUCKET/FOLDER, or an absolute path" \
      'that all hosts see' ;;
  esac
  if [[ -z $config ]]; then
    [[ $module != train ]] || refuse "no --config=... after '--'"
  elif [[ $config != /* ]]; then
    config_file=${config%%:*}
    [[ -f $config_file ]] || refuse "--config=$config: no such file in $PWD"
  fi
}

# check_env_file FILE: NAME=value lines. Says nothing of the values.
check_env_file() {
  local line number=0
  [[ -f $1 ]] || refuse "--env-file=$1: there is no such file"
  while IFS= read -r line || [[ -n $line ]]; do
    number=$((number + 1))
    [[ -z $line || $line == '#'* || $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] ||
      refuse "--env-file=$1: line $number, expected NAME=value"
  done <"$1"
}

# quoted WORDS: one line from which bash reads the words as they are.
quoted() {
  local line
  line=$(printf ' %q' "$@")
  printf '%s' "${line:1}"
}
