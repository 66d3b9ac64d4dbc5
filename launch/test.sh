#!/usr/bin/env bash
# Lint, types and the full test suite, with two workers. Arguments are passed to pytest: ./launch/test.sh -n 0 -k lanes
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
install_requirements requirements-dev.txt
ruff check .
ruff format --check .
mypy
# In the order of the files: by default the few slow tests of some would come last, and keep one worker idle.
exec python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
