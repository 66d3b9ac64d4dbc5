#!/usr/bin/env bash
# Train, and resume from the last checkpoint when a rank or a host dies.
#
#   ./launch/supervise.sh [--hostfile FILE | --processes N] [--retries 5] [--pause 5s] [--stall 30m] \
#       RUN.yaml [--set section.key=value ...]
#
# Exit code: 0 finished, 2 wrong input, 75 stopped and saved (SIGTERM, SIGUSR1, first Ctrl-C), 76 diverged,
# 130 ended at once (second Ctrl-C), 1 gave up.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
from_any_folder
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m megatron_style.supervise "$@"
