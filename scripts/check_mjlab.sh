#!/usr/bin/env bash
# Check GymWrapper on mjlab's environments, on the CPU. CI does not run it, since .venv-mjlab takes gigabytes, and mjlab
# needs a newer mujoco than .venv. Later runs reuse .venv-mjlab. PYTHON sets the interpreter, by default python3.
# Arguments are passed to check_mjlab.py.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-mjlab
stamp=$venv/.installed
needs_gb=12

if [[ ! -e $stamp || $stamp -ot constraints.txt || $stamp -ot pyproject.toml || $stamp -ot scripts/check_mjlab.sh ]]; then
    free_gb=$(df --output=avail -BG . | tail -n 1 | tr -dc '0-9')
    if ((free_gb < needs_gb)); then
        echo "mjlab: $venv may need $needs_gb GB, and $free_gb GB are free here" >&2
        exit 1
    fi
    echo "mjlab: installing into $venv"
    [[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
    # Only the versions that matter to the check are constrained, since mjlab needs its own versions of the others.
    grep -E '^(gymnasium|hoptorch|llvmlite|numba|numpy|tensordict|torch|torchrl)==' constraints.txt >"$venv/constraints.txt"
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt")
    # torch first and alone, so that pip prefers a CPU build if a configured index or wheel folder has it.
    "${install[@]}" torch
    "${install[@]}" --editable ".[torchrl]" "mjlab==1.6.*"
    touch "$stamp"
fi

# Hides GPUs, and stores the kernels that warp compiles in the virtual environment.
exec env CUDA_VISIBLE_DEVICES="" WARP_CACHE_PATH="$venv/warp" "$venv/bin/python" scripts/check_mjlab.py "$@"
