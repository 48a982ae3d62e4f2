#!/usr/bin/env bash
# Make .venv-meltingpot, in which the tests run ParallelEnv on Melting Pot. It needs TensorFlow and jax, and its
# simulator dmlab2d has wheels for some machines only. If it is complete, this script does nothing. With --if-possible,
# a missing wheel is reported but is not an error. PYTHON sets the interpreter, by default python3.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/venv_inputs.sh
. scripts/venv_inputs.sh
python=${PYTHON:-python3}
needs_gb=12

say() { printf 'meltingpot: %s\n' "$*"; }

case ${1:-} in
"" | --if-possible) ;;
*)
    say "unknown argument '$1'; use: $0 [--if-possible]" >&2
    exit 2
    ;;
esac

begin_venv meltingpot "$python" constraints.txt pyproject.toml
skipped=$venv/.skipped # the reason for skipping, which the tests report

# Machines with wheels of dmlab2d 1.0.2 and tensorflow-cpu 2.21. pip cannot be used for this, since it also reports "no
# matching distribution" without a network.
reason=$("$python" - <<'END'
import platform, sys
version = "%d.%d" % sys.version_info[:2]
libc, release = platform.libc_ver()
glibc = tuple(map(int, release.split(".")[:2])) if libc == "glibc" else (0, 0)
system = "%s on %s with %s %s" % (platform.system(), platform.machine(), libc or "an unknown libc", release)
if version not in ("3.11", "3.12", "3.13"):
    print("dmlab2d and tensorflow-cpu have wheels for Python 3.11, 3.12 and 3.13, and this is %s" % version)
elif (platform.system(), platform.machine()) != ("Linux", "x86_64") or glibc < (2, 35):
    print("dmlab2d has wheels for Linux on x86_64 with glibc 2.35 or newer, and this is %s" % system)
END
)
if [[ -n $reason ]]; then
    if [[ ${1:-} == --if-possible ]]; then
        mkdir -p "$venv"
        echo "$reason" >"$skipped"
        say "skipped: $reason"
        exit 0
    fi
    say "$reason; name another Python: PYTHON=python3.11 $0" >&2
    exit 1
fi

free_gb=$(df --output=avail -BG . | tail -n 1 | tr -dc '0-9')
if ((free_gb < needs_gb)); then
    say "$venv may need $needs_gb GB, and $free_gb GB are free here" >&2
    exit 1
fi

say "installing into $venv"
rm -f "$skipped"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
# The versions of the other tests, except h5py's, which TensorFlow does not allow.
grep -v '^h5py==' constraints.txt >"$venv/constraints.txt"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt")
# torch first and alone, so that pip prefers a CPU build if a configured index or wheel folder has it.
"${install[@]}" torch
# Requirements of "import meltingpot", including TensorFlow for its bots. Other parts need pandas, pygame and OpenCV.
"${install[@]}" --editable ".[torchrl]" ipykernel matplotlib "dmlab2d==1.0.2" "tensorflow-cpu==2.21.*" \
    absl-py "chex==0.1.*" dm-env dm-tree "immutabledict==4.*" "ml-collections==1.*" "reactivex==4.*"

# Its build downloads hundreds of megabytes of bots, unless it finds an archive in TMPDIR. This one is empty.
assets=$(mktemp -d)
trap 'rm -rf "$assets"' EXIT
mkdir "$assets/assets"
tar -czf "$assets/meltingpot-assets-2.3.0.tar.gz" -C "$assets" assets
TMPDIR=$assets "${install[@]}" --no-deps "dm-meltingpot==2.4.1"

TF_ENABLE_ONEDNN_OPTS=0 "$venv/bin/python" -c 'import meltingpot.substrate'
finish_venv
