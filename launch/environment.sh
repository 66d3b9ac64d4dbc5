# Sourced by the other scripts: sets up the virtual environment and the variables of processes.
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$project/.venv/bin:$PATH"
export TORCH_EXTENSIONS_DIR="$project/.venv/torch_extensions" # one per environment: a stale lock elsewhere hangs the start
gpus=$( (command -v nvidia-smi >/dev/null && nvidia-smi -L || true) | wc -l)
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR=cpu

# Let processes find the project from the caller's folder, which stays the current one: paths are relative to it.
from_any_folder() { export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}"; }

# Choose a number of processes on this machine, one per GPU or two, and their threads, unless the caller has.
choose_processes() {
    PROCESSES=${PROCESSES:-$((gpus > 0 ? gpus : 2))}
    local share=$(($(nproc) / PROCESSES))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 1 ? share : 1))}
}

# Make .venv and install a requirements file into it, unless that was already done for these files.
install_requirements() {
    local file=$1 python=${PYTHON:-python3} stamp
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "error: $python is $("$python" --version 2>&1); set PYTHON to Python 3.11 or newer" >&2; return 2; }
    [ -x .venv/bin/pip ] || "$python" -m venv .venv || return
    stamp=".venv/$(cat constraints.txt requirements.txt requirements-neighbours.txt "$file" | sha256sum | cut -c 1-16).installed"
    [ -e "$stamp" ] && return
    echo "Installing $file into .venv (once; a minute or two) ..." >&2
    pip install --quiet --disable-pip-version-check --requirement "$file" --constraint constraints.txt || return
    touch "$stamp"
}

# Print a free port of this machine.
free_port() { python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])' 2>/dev/null; }

# Run a launcher in its own session (one Ctrl-C must not reach it twice), pass signals to it and return its exit code.
run() {
    local name caught=1 code
    setsid python -m megatron_style.supervision.launch "$@" &
    for name in TERM USR1 INT; do trap "caught=1; kill -$name $! 2>/dev/null || :" "$name"; done
    while [ "$caught" = 1 ]; do caught=0 code=0; wait $! || code=$?; done # a signal ends `wait`, not the launcher
    trap - TERM USR1 INT
    return "$code"
}

# Exit with a one-line error unless the argument is a file or a shipped run file; the script's second line is its usage.
need_file() {
    [ -f "${1:-}" ] || [[ ${1:-} == run_configs/* && -f $project/$1 ]] || { echo "error: ${1:-RUN.yaml}: no such file; $(sed -n '2s/^# //p' "$0")" >&2; exit 2; }
}

# Export what ranks on other hosts need, and keep only the names for `mpirun -x`: command lines are public.
export_carried() {
    local lines line
    lines=$(python -m megatron_style.hosts.forwarded_environment)
    carried=()
    while IFS= read -r line; do export "${line?}"; carried+=(-x "${line%%=*}"); done <<<"$lines"
}
