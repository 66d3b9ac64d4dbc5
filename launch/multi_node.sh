#!/usr/bin/env bash
# usage: ./launch/multi_node.sh HOSTFILE RUN.yaml [flags of train]
# On the hosts of a hostfile (launch/hostfile.example), over ssh and pdsh, from any one of them. The project, the
# current folder, the data and the output must have the same path on every host.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
from_any_folder
need_file "${1:-HOSTFILE}"
need_file "${2:-}"
hostfile=$1
shift

exec python -m megatron_style.supervision.launch deepspeed --log_level warning --hostfile "$hostfile" \
    --master_port "${MASTER_PORT:-29500}" --module megatron_style.train "$@"
