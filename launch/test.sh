#!/usr/bin/env bash
# Lint, types and the whole test suite, by two workers. Arguments go to pytest: ./launch/test.sh -n 0 -k lanes
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
install_requirements requirements-dev.txt
ruff check .
ruff format --check .
mypy
exec python -m pytest --numprocesses 2 --dist loadfile "$@"
