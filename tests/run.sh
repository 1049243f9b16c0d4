#!/usr/bin/env bash
# All tests, in two processes: tests/run.sh PYTHON [pytest's arguments]
# Those that only compute stand back behind those that serve, which want the processor the moment they ask for it.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
said=$(mktemp)
nice -n 19 "$python" -m pytest tests/tidar_core -p no:cacheprovider "$@" >"$said" 2>&1 &
computing=$!
trap 'kill $computing 2>/dev/null; cat "$said"; rm -f "$said"' EXIT
"$python" -m pytest tests --ignore tests/tidar_core "$@"
served=$?
wait $computing
computed=$?
exit $((served > computed ? served : computed))
