#!/usr/bin/env bash
# Installs what MuJoCo needs to render without a display, EGL, GLX and Mesa's software renderers, and a C compiler.
# Does nothing where everything is there. On systems without apt it names what is needed and leaves it to you.
# PYTHON names the interpreter if that is not python3.
set -euo pipefail

packages=(
    libegl1          # EGL: the windowless way to a GPU, MUJOCO_GL=egl
    libegl-mesa0     # EGL without a GPU
    libgl1           # OpenGL
    libglx-mesa0     # OpenGL for glfw
    libgl1-mesa-dri  # Mesa's drivers, llvmpipe among them: rendering on the CPU
    libosmesa6       # rendering into memory, MUJOCO_GL=osmesa
    gcc              # robosuite needs evdev, which pip compiles; the tests compile drivers of machines with GPUs
    g++              # scripts/build_torchrl_extension.sh compiles TorchRL's C++ part
    libc6-dev        # its headers, and with linux-libc-dev those of the kernel that evdev reads
    linux-libc-dev
)

# Debian's own Python keeps its headers in a package; others bring them along.
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
