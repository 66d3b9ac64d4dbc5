#!/usr/bin/env bash
# usage: [PROCESSES=N] ./launch/local.sh RUN.yaml [flags of train]
# On this machine: N processes, by default one per GPU, or two on a machine without GPUs.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
from_any_folder
need_file "${1:-}"
choose_processes
exec python -m megatron_style.supervision.launch deepspeed --log_level warning \
    --num_accelerators "$PROCESSES" --master_port "${MASTER_PORT:-$(free_port)}" \
    --module megatron_style.train "$@"
