#!/usr/bin/env bash
# Install EGL, GLX and Mesa's software renderers, with which MuJoCo renders without a display, and a C compiler. If all
# packages are installed, this script does nothing. On systems without apt, it only prints their names. PYTHON sets the
# interpreter, by default python3.
set -euo pipefail

packages=(
    libegl1          # EGL: rendering on a GPU without windows, MUJOCO_GL=egl
    libegl-mesa0     # EGL without a GPU
    libgl1           # OpenGL
    libglx-mesa0     # OpenGL for glfw
    libgl1-mesa-dri  # Mesa's drivers, including llvmpipe for the CPU
    libosmesa6       # rendering into memory, MUJOCO_GL=osmesa
    gcc              # pip compiles evdev for robosuite; the tests compile mock drivers of GPUs
    g++              # scripts/build_torchrl_extension.sh compiles TorchRL's C++ part
    libc6-dev        # its headers; linux-libc-dev has the kernel's, which evdev reads
    linux-libc-dev
)

# Debian's own Python has its headers in a package; others include them.
python=$(command -v "${PYTHON:-python3}" || true)
if [[ $python == /usr/bin/* && ! -e $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]]; then
    packages+=(python3-dev)
fi

say() { printf 'system packages: %s\n' "$*"; }

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    say "this is not Debian or Ubuntu; rendering needs what Debian calls: ${packages[*]}"
    exit 0
fi

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $status == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
    say "nothing to do"
    exit 0
fi

as_root=()
if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
        say "missing: ${missing[*]}"
        say "not root and no sudo; ask for: apt-get install --no-install-recommends ${missing[*]}"
        exit 0
    fi
    as_root=(sudo)
fi

say "installing with apt-get: ${missing[*]}"
"${as_root[@]}" apt-get update --quiet
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install --yes --quiet --no-install-recommends "${missing[@]}"
