#!/usr/bin/env bash
# Run a library's own tests with this project's classes in place of the library's.
#
#   scripts/upstream_tests.sh sb3 ~/src/stable-baselines3 [FILE…] [-- PYTEST OPTION…]
#   scripts/upstream_tests.sh sb3-contrib ~/src/stable-baselines3-contrib
#   scripts/upstream_tests.sh torchrl ~/src/rl
#   scripts/upstream_tests.sh gymnasium ~/src/Gymnasium
#
# The checkout is only read; use the tag nearest to the installed version. Tests that pass with the library's own
# classes and fail with ours are printed, except those that scripts/upstream_differences.txt explains.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
[[ -x $PYTHON ]] || { echo "$PYTHON does not exist: run 'make test' once, or set PYTHON" >&2; exit 2; }
exec "$PYTHON" scripts/upstream_tests.py "$@"
