# Functions for the scripts that make virtual environments, which source this file.
#
# A virtual environment is made again only if one of its inputs has changed: the files named, the folder of the
# repository, or the Python version. RL_EXT_VENV_CACHE names a folder that outlasts the checkout, as in CI. Then
# .venv-NAME is a link to a folder in it, one for each state of the inputs.
# shellcheck shell=bash

# Set venv, stamp and key for .venv-NAME. Exit if it was made from the same inputs.
#   begin_venv NAME PYTHON FILE...
begin_venv() {
    local name=$1 python=$2 made
    shift 2
    venv=.venv-$name
    key=$({ pwd && "$python" --version && cat "scripts/$(basename "$0")" "$@"; } | sha256sum | cut -c1-16)
    if [[ -n ${RL_EXT_VENV_CACHE:-} && (-L $venv || ! -e $venv) ]]; then
        mkdir -p "$RL_EXT_VENV_CACHE/$name-$key"
        ln -sfn "$(cd "$RL_EXT_VENV_CACHE/$name-$key" && pwd)" "$venv"
        venv=$(readlink -f "$venv") # Python makes no virtual environment at a link
    fi
    stamp=$venv/.installed
    made=$(cat "$stamp" 2>/dev/null || true)
    if [[ -e $stamp && $made == "$key" ]]; then
        printf '%s is not made again: its inputs have not changed (%s, the Python version, the folder)\n' \
            "$venv" "$(printf '%s, ' "$(basename "$0")" "$@" | sed 's/, $//')"
        exit 0
    fi
    if [[ -e $stamp ]]; then
        printf '%s is made again: one of its inputs has changed\n' "$venv"
    else
        printf '%s is made: it is not complete\n' "$venv"
    fi
    rm -f "$stamp"
}

# Mark the virtual environment as complete.
finish_venv() { echo "$key" >"$stamp"; }
