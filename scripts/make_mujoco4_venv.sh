#!/usr/bin/env bash
# Make .venv-mujoco4, in which tests query the device that mujoco 4 selects. robosuite limits .venv to mujoco < 3.10. If
# it is complete, this script does nothing. PYTHON sets the interpreter, by default python3.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/venv_inputs.sh
. scripts/venv_inputs.sh
python=${PYTHON:-python3}

say() { printf 'mujoco 4: %s\n' "$*"; }

begin_venv mujoco4 "$python" constraints.txt
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "needs Python 3.11 or newer, but $python is older; use another one: PYTHON=python3.12 $0"
    exit 1
fi

say "installing into $venv"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
# The versions of the other tests, except mujoco's.
grep -v '^mujoco==' constraints.txt >"$venv/constraints.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$venv/constraints.txt" "mujoco==4.0.0"
finish_venv
