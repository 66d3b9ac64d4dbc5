#!/usr/bin/env bash
# Lint, types and all tests, in parallel; with --fast first, without the slow tests. Other arguments go to pytest:
# ./launch/test.sh --fast -k lanes
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
install_requirements requirements-dev.txt
unset PYTHONDONTWRITEBYTECODE # else each of hundreds of processes compiles all modules that it imports
lane=() workers=3 # on two cores: some tests wait for a timeout, or for processes that wait
if [ "${1:-}" = --fast ]; then
    lane=(-m "not slow and not sweep") workers=2
    shift
fi
ruff check .
ruff format --check .
types=$(mktemp)
trap 'rm -f "$types"' EXIT
mypy >"$types" 2>&1 & # while the tests run: it uses one core only
checked=$!
status=0
# A worker that has nothing left takes tests from the other; else a file of slow tests would leave it waiting.
python -m pytest --numprocesses "$workers" --dist worksteal "${lane[@]}" "$@" || status=$?
wait "$checked" || status=$?
cat "$types"
exit "$status"
