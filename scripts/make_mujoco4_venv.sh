#!/usr/bin/env bash
# Makes .venv-mujoco4, in which tests ask mujoco 4 itself which device it picks: robosuite keeps .venv below mujoco 3.10.
# Does nothing where it is there already. PYTHON names another interpreter than python3.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-mujoco4
stamp=$venv/.installed
python=${PYTHON:-python3}

say() { printf 'mujoco 4: %s\n' "$*"; }

if [[ -e $stamp && ! $stamp -ot constraints.txt && ! $stamp -ot scripts/make_mujoco4_venv.sh ]]; then
    say "nothing to do"
    exit 0
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "needs Python 3.11 or newer, and $python is older; name another one: PYTHON=python3.12 $0"
    exit 1
fi

say "installing into $venv"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
# The versions that the other tests run with, but for mujoco's own.
grep -v '^mujoco==' constraints.txt >"$venv/constraints.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$venv/constraints.txt" "mujoco==4.0.0"
touch "$stamp"
