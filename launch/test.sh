#!/usr/bin/env bash
# Lint, types and all tests, by two workers; with --fast first, without the slow tests. Other arguments go to pytest:
# ./launch/test.sh --fast -k lanes
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
install_requirements requirements-dev.txt
unset PYTHONDONTWRITEBYTECODE  # else each of hundreds of processes compiles all modules that it imports
lane=()
if [ "${1:-}" = --fast ]; then
    lane=(-m "not slow and not sweep")
    shift
fi
ruff check .
ruff format --check .
mypy
# A worker that has nothing left takes tests from the other; else a file of slow tests would leave it waiting.
exec python -m pytest --numprocesses 2 --dist worksteal "${lane[@]}" "$@"
