#!/usr/bin/env bash
# usage: ./launch/mpi.sh HOSTFILE RUN.yaml [flags of train]
# On the hosts of a hostfile, with Open MPI: one process per slot. `-m mpi4py` ends all of them when one fails;
# without it the others would wait forever.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
from_any_folder
need_file "${1:-HOSTFILE}"
need_file "${2:-}"
hostfile=$1
shift

# MPI's own sockets listen on all interfaces; ranks of one machine need none.
[ "$(grep -c '^[^#]*slots=' "$hostfile")" -gt 1 ] || export OMPI_MCA_btl=${OMPI_MCA_btl:-self,sm}
export_carried
exec python -m megatron_style.supervision.launch mpirun --hostfile "$hostfile" --bind-to none -x MEGATRON_STYLE_LAUNCH \
    "${carried[@]}" python -m mpi4py -m megatron_style.train "$@"
