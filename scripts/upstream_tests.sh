#!/usr/bin/env bash
# Run the test suite of a library that is extended here with this project's classes in the places of its own.
#
#   scripts/upstream_tests.sh sb3 ~/src/stable-baselines3 [FILE…] [-- PYTEST OPTION…]
#   scripts/upstream_tests.sh sb3-contrib ~/src/stable-baselines3-contrib
#   scripts/upstream_tests.sh torchrl ~/src/rl
#   scripts/upstream_tests.sh gymnasium ~/src/Gymnasium
#
# The checkout is read, never written to: take the tag nearest to the installed version. What passes with the
# library's own classes and fails with ours is printed, but for what scripts/upstream_differences.txt explains.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
[[ -x $PYTHON ]] || { echo "$PYTHON is not there: run 'make test' once, or set PYTHON" >&2; exit 2; }
exec "$PYTHON" scripts/upstream_tests.py "$@"
