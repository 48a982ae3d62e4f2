#!/usr/bin/env bash
# Runs the buffers' tests with the lowest versions that pyproject.toml allows and with the newest, in each Python.
#
#   scripts/versions.sh [-k lowest|newest] [PYTHON ...]      # names or paths; default: python3.10 to python3.14
#
# The environments are made in .venv-versions. What needs torch is left out where torch is not installed: of the same
# version, pip has to find a build for the CPU (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), else set TORCH=1 to take any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kinds=(lowest newest)
while getopts k: option; do
    [[ $option == k ]] && kinds=("$OPTARG")
done
shift $((OPTIND - 1))
pythons=("$@")
[[ $# -gt 0 ]] || pythons=(python3.10 python3.11 python3.12 python3.13 python3.14)
table=()

# The requirements of the core and its extras for frames, as they stand or with == in place of >=.
requirements() {
    "$1" - "$2" <<'PYTHON'
import re
import sys

text = open("pyproject.toml", encoding="utf-8").read()
core = re.search(r"\ndependencies = \[(.*?)\n\]", text, re.S)[1]
frames = re.findall(r"^frames(?:-jpeg)? = \[(.*)\]", text, re.M)
for name in re.findall(r'"([^"]+)"', core + " ".join(frames)):
    if not name.startswith("rl-ext["):
        print(name.replace(">=", "==") + ".*" if sys.argv[1] == "lowest" else name)
PYTHON
}

failed=0
for python in "${pythons[@]}"; do
    if ! "$python" -c '' 2>/dev/null; then
        table+=("$python: not there")
        continue
    fi
    for kind in "${kinds[@]}"; do
        version=$("$python" -c 'import platform; print(platform.python_version())')
        venv=.venv-versions/$version-$kind
        [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
        mapfile -t wanted < <(requirements "$venv/bin/python" "$kind")
        if [[ -n ${TORCH:-} ]]; then
            wanted+=("torch>=2.1" "stable-baselines3>=2.3" "gymnasium>=0.29")
        fi
        if ! "$venv/bin/python" -m pip install --quiet --only-binary=:all: --upgrade "${wanted[@]}" \
            >"$venv/log" 2>&1; then
            table+=("Python $version, $kind: not installable: $(grep -m 1 '^ERROR' "$venv/log")")
            continue
        fi
        versions=$("$venv/bin/python" -m pip list --format freeze 2>/dev/null |
            grep -E '^(numpy|numba|lz4|simplejpeg|cloudpickle|torch|stable_baselines3)==' | tr '\n' ' ')
        outcome=passed
        PYTHONPATH=$PWD:$PWD/shared "$venv/bin/python" tests/platforms/buffers.py >"$venv/log" 2>&1 || outcome=FAILED
        [[ $outcome == passed ]] || { failed=1; grep FAILED "$venv/log" || tail -5 "$venv/log"; }
        table+=("Python $version, $kind: $outcome with $versions")
        printf '%s\n' "${table[-1]}"
    done
done
printf '\n%s\n' "compatibility:" "${table[@]}"
exit "$failed"
