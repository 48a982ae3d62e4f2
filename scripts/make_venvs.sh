#!/usr/bin/env bash
# Make the virtual environments of the slow tests, and TorchRL's C++ extension, at the same time. Prints the output of
# each script when it has ended. Fails if one of them fails, after all have ended.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

declare -A running
start() {
    "scripts/$1.sh" "${@:2}" >"$logs/$1" 2>&1 &
    running[$1]=$!
}
start build_torchrl_extension
start make_mujoco4_venv
start make_meltingpot_venv --if-possible
start make_jax_venv

failed=()
for name in "${!running[@]}"; do
    wait "${running[$name]}" || failed+=("$name")
    sed "s/^/$name: /" "$logs/$name"
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
