#!/usr/bin/env bash
# Run tests with the lowest versions that pyproject.toml allows and with the newest, in each Python, and write the
# results into the table of docs/compatibility.md.
#
#   scripts/versions.sh [-k lowest|newest] [-e EXTRAS] [-t TESTS] [PYTHON ...]
#
#   PYTHON  names or paths; default: python3.10 to python3.14
#   -e      extras to install, such as torchrl; default: contrib,frames-jpeg
#   -t      tests to run; default: those of other systems, of frames, and of SB3's buffers and environments
#
# Virtual environments are made in .venv-versions, and reused if they exist. torch has gigabytes of CUDA libraries,
# unless pip finds a CPU build (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kinds=(lowest newest) extras=contrib,frames-jpeg
tests="tests/platforms tests/core/frames tests/sb3_ext/test_replay_buffer.py
    tests/sb3_ext/test_vec_env_matches_subproc.py tests/sb3_ext/test_vec_env_failures.py
    tests/test_worker_faults.py"
while getopts k:e:t: option; do
    case $option in
    k) kinds=("$OPTARG") ;;
    e) extras=$OPTARG ;;
    t) tests=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
pythons=("$@")
[[ $# -gt 0 ]] || pythons=(python3.10 python3.11 python3.12 python3.13 python3.14)

# Prints the requirements of the core and of extras, for "lowest" with == instead of >=.
requirements() {
    "$1" - "$2" "$extras" <<'PYTHON'
import re
import sys

kind, extras = sys.argv[1:]
text = open("pyproject.toml", encoding="utf-8").read()


def quoted(name):
    return re.findall(r'"([^"]+)"', re.search(rf"^{name} = \[(.*?)\]$", text, re.S | re.M)[1])


wanted = quoted("dependencies")
todo = extras.split(",")
while todo:
    for requirement in quoted(todo.pop()):
        nested = re.match(r"rl-ext\[(.*)\]", requirement)
        if nested:
            todo += nested[1].split(",")
        elif requirement not in wanted:
            wanted.append(requirement)
for requirement in wanted:
    print(re.sub(">=([^,]+)", r"==\1.*", requirement) if kind == "lowest" else requirement)
PYTHON
}

# Writes a row into the table, and replaces an earlier one.
write() {
    python3 - "$@" <<'PYTHON'
import re
import sys
from pathlib import Path

page = Path("docs/compatibility.md")
text = page.read_text(encoding="utf-8")
begin, end = "<!-- by scripts/versions.sh -->\n", "<!-- end -->"
before, rows, after = re.split(f"{begin}|{end}", text)
head, of_rows = rows.splitlines(keepends=True)[:2], rows.splitlines()[2:]
new = "| " + " | ".join(sys.argv[1:]) + " |"
kept = [row for row in of_rows if row.split("|")[1:3] != new.split("|")[1:3]]
ordered = sorted([*kept, new], key=lambda row: [int(number) for number in row.split("|")[1].split(".")])
page.write_text(before + begin + "".join(head) + "\n".join(ordered) + "\n" + end + after, encoding="utf-8")
PYTHON
}

failed=0
for python in "${pythons[@]}"; do
    if ! version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null); then
        printf 'Python %s does not exist\n' "$python"
        continue
    fi
    for kind in "${kinds[@]}"; do
        venv=$PWD/.venv-versions/$version-$kind
        if [[ ! -e $venv/.made ]]; then
            rm -rf "$venv"
            "$python" -m venv "$venv"
            mapfile -t wanted < <(requirements "$venv/bin/python" "$kind")
            if ! "$venv/bin/python" -m pip install --quiet --prefer-binary "${wanted[@]}" pytest pytest-timeout \
                pytest-xdist hypothesis psutil >"$venv/log" 2>&1; then
                write "$version" "$kind" "" "cannot be installed: $(grep -v '^WARNING\|^ *$' "$venv/log" | tail -1)"
                continue
            fi
            touch "$venv/.made"
        fi
        versions=$("$venv/bin/python" -m pip list --format freeze 2>/dev/null | tr _ - |
            grep -E '^(torch|torchrl|stable-baselines3|gymnasium|numpy|numba|simplejpeg|cloudpickle|rich)==' |
            sed 's/==/ /; s/stable-baselines3/SB3/; s/numpy/NumPy/' | paste -sd, | sed 's/,/, /g')
        # Each numba version gets its own cache, since versions overwrite each other's code. Warnings of old versions
        # are not failures here.
        # shellcheck disable=SC2086  # several tests
        NUMBA_CACHE_DIR=$venv/numba PYTHONPATH=$PWD/shared "$venv/bin/python" -m pytest -q -p no:cacheprovider --numprocesses auto -W default \
            -m "not exhaustive and not slow" $tests 2>&1 | tee "$venv/log" || failed=1
        outcome=$(grep -E '^[0-9]+ (passed|failed)|^=* ?[0-9]+ (passed|failed)|^(ERROR|FAILED)' "$venv/log" | tail -1 |
            sed -E 's/^=+ //; s/ in [0-9].*//; s/, [0-9]+ warnings?//')
        write "$version" "$kind" "$versions" "$outcome"
    done
done
exit "$failed"
