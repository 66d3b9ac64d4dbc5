#!/usr/bin/env bash
# Lint, types and the whole test suite. Arguments go to pytest: ./launch/test.sh -k lanes
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
install_requirements requirements-dev.txt
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
