"""A longer run of what the tests do shortly: streams over replicas that are killed or stopped under them.

For example: python -m tests.cluster.kill_run --seconds 60 --blow kill
"""

import argparse
import tempfile
from pathlib import Path

from cluster.options import ServeOptions
from tests.cluster.kills import (
    Verdict,
    end,
    hang,
    judge,
    kill,
    slow_model,
    stop_for,
    streams_under_blows,
    wait_for_replicas,
)
from tests.servers import running, start_with

BLOWS = {"kill": kill, "end": end, "stop": stop_for(6.0), "hang": hang}


def run(directory: Path, options: ServeOptions, streams: int, seconds: float, tokens: int, blow: str) -> Verdict:
    """Start a server, disturb it, stop it, compare; prints one line."""
    with running(start_with(directory, options, cpus=options.replicas + 1)) as server:
        wait_for_replicas(server, options.replicas)
        told, blows = streams_under_blows(server, streams, seconds, tokens, 5.0, BLOWS[blow])
        for name in ("tidar:stream_handovers_total", "tidar:stream_handover_seconds_sum"):
            print(name, server.metric(name))
        log = server.log.read_text()
    verdict = judge(told, options, blows)
    print(verdict.line())
    assert "Traceback" not in log
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--blow", choices=BLOWS, default="kill")
    parser.add_argument("--model", help="default: a tiny random checkpoint")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if chosen.model:
            model, adapter = chosen.model, "default"
        else:
            model, adapter = map(str, slow_model(directory))
        # What a request leaves open is neutral here whatever the model: the engine that it is compared with takes that.
        options = ServeOptions(
            model=model,
            adapter=adapter,
            device="cpu",
            replicas=chosen.replicas,
            threads=1,
            generation_config="none",
        )
        run(directory, options, chosen.streams, chosen.seconds, chosen.tokens, chosen.blow)


if __name__ == "__main__":
    main()
