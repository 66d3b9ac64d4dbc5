#!/usr/bin/env bash
# usage: [PROCESSES=N] [NODES=N NODE_RANK=I MASTER_ADDR=HOST] ./launch/torchrun.sh RUN.yaml [flags of train]
# On this machine or, if started on each of NODES hosts with its NODE_RANK, on all of them; MASTER_ADDR is the first.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
from_any_folder
need_file "${1:-}"
rank=${NODE_RANK:-${JOB_COMPLETION_INDEX:-0}} # Kubernetes sets the latter in the pods of an indexed Job
meet=(--node-rank "$rank" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}")
if [ "${NODES:-1}" = 1 ]; then # torchrun's own rendezvous would listen on all interfaces: a file serves one machine
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    file=$(mktemp)
    (tail --pid=$$ -f /dev/null; rm "$file") &>/dev/null & # exec replaces this script, which therefore cannot clean up
    meet=(--rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint "$file" --local-addr 127.0.0.1)
fi
exec python -m megatron_style.supervision.launch torchrun --nnodes "${NODES:-1}" --nproc-per-node "${PROCESSES:-auto}" \
    "${meet[@]}" -m megatron_style.train "$@"
