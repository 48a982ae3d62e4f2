#!/usr/bin/env bash
# Check GymWrapper on VMAS's scenarios, on the CPU. CI does not run it, since .venv-vmas takes more than a gigabyte, and
# VMAS needs the old gym. Later runs reuse .venv-vmas. PYTHON sets the interpreter, by default python3. Arguments are
# passed to check_vmas.py.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-vmas
stamp=$venv/.installed
needs_gb=6

if [[ ! -e $stamp || $stamp -ot constraints.txt || $stamp -ot pyproject.toml || $stamp -ot scripts/check_vmas.sh ]]; then
    free_gb=$(df --output=avail -BG . | tail -n 1 | tr -dc '0-9')
    if ((free_gb < needs_gb)); then
        echo "vmas: $venv may need $needs_gb GB, and $free_gb GB are free here" >&2
        exit 1
    fi
    echo "vmas: installing into $venv"
    [[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
    # Only the versions that matter to the check are constrained, since VMAS needs its own versions of the others.
    grep -E '^(gymnasium|hoptorch|llvmlite|numba|numpy|tensordict|torch|torchrl)==' constraints.txt >"$venv/constraints.txt"
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt")
    # torch first and alone, so that pip prefers a CPU build if a configured index or wheel folder has it.
    "${install[@]}" torch
    "${install[@]}" --editable ".[torchrl]" "vmas[gymnasium]==1.5.*"
    touch "$stamp"
fi

# Hides GPUs.
exec env CUDA_VISIBLE_DEVICES="" "$venv/bin/python" scripts/check_vmas.py "$@"
