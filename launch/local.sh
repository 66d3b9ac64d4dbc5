#!/usr/bin/env bash
# usage: [PROCESSES=N] ./launch/local.sh RUN.yaml [flags of train]
# On this machine: N processes, by default one per GPU, or two on a machine without GPUs.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
from_any_folder
need_file "${1:-}"
choose_processes
export MASTER_PORT=${MASTER_PORT:-$(free_port)}
exec python -m megatron_style.supervision.launch \
    python -m megatron_style.hosts.local "$PROCESSES" megatron_style.train "$@"
