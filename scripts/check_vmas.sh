#!/usr/bin/env bash
# Checks GymWrapper on scenarios of VMAS, on the CPU. By hand, not in CI: .venv-vmas takes more than a gigabyte, and VMAS
# brings the old gym along. The second run finds it and starts at once. PYTHON names another interpreter than python3.
# Arguments go to check_vmas.py.
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
    # Of the tested versions, those that matter to what is checked; VMAS wants its own of the others.
    grep -E '^(gymnasium|hoptorch|llvmlite|numba|numpy|tensordict|torch|torchrl)==' constraints.txt >"$venv/constraints.txt"
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt")
    # torch first and alone: pip then prefers a CPU build, where one of its indexes or wheel folders has it.
    "${install[@]}" torch
    "${install[@]}" --editable ".[torchrl]" "vmas[gymnasium]==1.5.*"
    touch "$stamp"
fi

# No GPU is looked for.
exec env CUDA_VISIBLE_DEVICES="" "$venv/bin/python" scripts/check_vmas.py "$@"
