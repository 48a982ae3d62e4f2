#!/usr/bin/env bash
# Makes .venv-sbx, in which tests train SBX and rl-zoo3 with our classes: .venv with these two and what they need on top,
# of which rl-zoo3 asks for an older python-dateutil. Needs .venv as `make test` makes it; does nothing where it is done.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-sbx
stamp=$venv/.installed

say() { printf 'SBX and rl-zoo3: %s\n' "$*"; }

if [[ -e $stamp && ! $stamp -ot constraints.txt && ! $stamp -ot scripts/make_sbx_venv.sh ]]; then
    say "nothing to do"
    exit 0
fi

say "installing into $venv"
[[ -x $venv/bin/python ]] || .venv/bin/python -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# addsitedir, and not the folder alone, so that editable installations are seen as well.
printf 'import site; site.addsitedir("%s")\n' "$(site .venv)" >"$(site "$venv")/beneath.pth"
grep -v '^python-dateutil==' constraints.txt >"$venv/constraints.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$venv/constraints.txt" "sbx-rl==0.28.0" "rl-zoo3==2.9.2" "jax==0.10.2" "flax==0.12.8"
touch "$stamp"
