#!/usr/bin/env bash
# Build TorchRL's C++ extension, which PrioritizedSampler needs, for the installed torch, and install it into .venv.
#
# The extension in TorchRL's wheel loads with one version of torch only. TorchRL 0.14.1 needs torch 2.14, but the tests
# run with torch 2.13, which has a small CPU build. The wheel contains the sources. If the extension loads already, this
# script does nothing. PYTHON sets the interpreter, by default .venv/bin/python.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
say() { printf 'TorchRL extension: %s\n' "$*"; }

if "$python" -c 'import torch, torchrl._torchrl' 2>/dev/null; then
    say "nothing to do"
    exit 0
fi
if ! command -v "${CXX:-g++}" >/dev/null; then
    say "needs a C++ compiler: scripts/install_system_packages.sh installs g++, or set CXX"
    exit 1
fi

mapfile -t lines < <("$python" - <<'PYTHON'
import importlib.util
import sysconfig

from torch.utils.cpp_extension import include_paths, library_paths

folder = importlib.util.find_spec("torchrl").submodule_search_locations[0]
print(folder)
print(folder + "/_torchrl" + sysconfig.get_config_var("EXT_SUFFIX"))
print(*(f"-I{path}" for path in [*include_paths(), sysconfig.get_path("include")]), sep="\n")
print(*(f"-L{path}" for path in library_paths()), sep="\n")
PYTHON
)
folder=${lines[0]} extension=${lines[1]} paths=("${lines[@]:2}")
new=$extension.new
trap 'rm -f "$new"' EXIT

say "compiling for $("$python" -c 'import torch; print("torch", torch.__version__)'), which takes some minutes"
"${CXX:-g++}" -std=c++20 -O2 -DNDEBUG -shared -fPIC -DTORCH_EXTENSION_NAME=_torchrl "${paths[@]}" \
    "$folder/csrc/pybind.cpp" "$folder/csrc/utils.cpp" -ltorch_python -ltorch -ltorch_cpu -lc10 -o "$new"
# Replaces the file in one step, since other processes may be importing it, and since it may be a link to pip's cache.
mv "$new" "$extension"
"$python" -c 'import torch, torchrl._torchrl'
say "built $extension"
