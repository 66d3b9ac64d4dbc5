# Sourced by the other scripts: the virtual environment and the variables every process needs.

export PATH="$PWD/.venv/bin:$PATH"
export TORCH_EXTENSIONS_DIR="$PWD/.venv/torch_extensions" # one per environment: a stale lock elsewhere would hang the start
if ! command -v nvidia-smi >/dev/null; then
    export DS_ACCELERATOR=cpu
fi

# Make .venv and install a requirements file into it, unless that was already done for this very file.
install_requirements() {
    local file=$1 stamp
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    stamp=".venv/$(cat requirements.txt "$file" | sha256sum | cut -c 1-16).installed"
    [ -e "$stamp" ] && return
    echo "Installing $file into .venv (once, a minute or two) ..." >&2
    python -m pip install --quiet --disable-pip-version-check --requirement "$file"
    touch "$stamp"
}
