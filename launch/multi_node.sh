#!/usr/bin/env bash
# usage: ./launch/multi_node.sh HOSTFILE RUN.yaml [flags of train]
# On the hosts of a hostfile (launch/hostfile.example), over ssh and pdsh, from any one of them. The project, the data
# and the output lie under the same path on every host.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh
need_file "${1:-HOSTFILE}"
need_file "${2:-}"
hostfile=$1
shift

DS_ENV_FILE=$(mktemp) # the launcher carries what this file names to the other hosts, and nothing else
export DS_ENV_FILE
trap 'rm -f "$DS_ENV_FILE"' EXIT
python -m megatron_style.hosts.forwarded_environment >"$DS_ENV_FILE"
deepspeed --log_level warning --hostfile "$hostfile" --master_port "${MASTER_PORT:-29500}" \
    --module megatron_style.train "$@"
