#!/usr/bin/env bash
# usage: [PROCESSES=N] ./launch/local.sh RUN.yaml [flags of train]
# On this machine: one process per device that DeepSpeed finds (on a CPU: per NUMA node), or N processes.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
need_file "${1:-}"
exec python -m megatron_style.supervision.launch deepspeed --log_level warning \
    ${PROCESSES:+--num_accelerators "$PROCESSES"} --master_port "${MASTER_PORT:-$(free_port)}" \
    --module megatron_style.train "$@"
