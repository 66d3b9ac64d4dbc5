#!/usr/bin/env bash
# usage: [PROCESSES=N] [NODES=N NODE_RANK=I MASTER_ADDR=HOST] ./launch/torchrun.sh RUN.yaml [flags of train]
# On this machine or, started on every one of NODES hosts with its own NODE_RANK, on all of them; MASTER_ADDR is the first.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
need_file "${1:-}"
rank=${NODE_RANK:-${JOB_COMPLETION_INDEX:-0}} # the latter is what Kubernetes tells the pods of an indexed Job
exec python -m megatron_style.supervision.launch torchrun --nnodes "${NODES:-1}" --node-rank "$rank" \
    --nproc-per-node "${PROCESSES:-auto}" --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${MASTER_PORT:-29500}" -m megatron_style.train "$@"
