#!/usr/bin/env bash
# Run the scripts of the page "With other tools" with rl-zoo3, Optuna, wandb, hydra and imitation. CI does not run it,
# since imitation asks for older versions than the project. Later runs reuse .venv-tools. PYTHON sets the interpreter, by
# default python3. Arguments are parts of titles of sections, by default all.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-tools
stamp=$venv/.installed

if [[ ! -e $stamp || $stamp -ot constraints.txt || $stamp -ot pyproject.toml || $stamp -ot scripts/check_other_tools.sh ]]; then
    echo "tools: installing into $venv"
    [[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    # torch first and alone, so that pip prefers a CPU build if a configured index or wheel folder has it.
    "${install[@]}" --constraint constraints.txt torch
    "${install[@]}" --constraint constraints.txt --editable ".[sb3]" sb3-contrib optuna wandb tensorboard hydra-core rich tqdm
    "${install[@]}" "datasets>=2.8" sacred scikit-learn huggingface-hub wasabi "pytablewriter~=1.2" sb3-team-hf-integration "shimmy~=2.0"
    # Their bounds exclude each other, and pip would take versions for gym in place of gymnasium.
    "${install[@]}" --no-deps imitation seals rl_zoo3 "huggingface-sb3>=3"
    touch "$stamp"
fi

# Hides GPUs.
exec env CUDA_VISIBLE_DEVICES="" "$venv/bin/python" scripts/check_other_tools.py "$@"
