"""schemathesis against the server's own OpenAPI document: whatever is sent, no 5xx, no hang.

python -m tests.cluster.fuzz --cases 2000
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.guarded import Guarded, guarded_server
from tests.servers import REPOSITORY

SHARES = 5  # four operations with a body, and the others, of which there are few cases
TIMEOUT_SECONDS = 60  # for one request: what takes longer hangs
# Not among them: that whatever is against the document is refused. A field of OpenAI's that is not known is ignored.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "ignored_auth",
)


@dataclass(frozen=True)
class Outcome:
    """What a run of schemathesis found: statuses of all answers, what it printed, whether all checks passed."""

    passed: bool
    statuses: Counter[int]
    printed: str

    @property
    def cases(self) -> int:
        return self.statuses.total()


def fuzz(server: Guarded, cases: int, seed: int, phases: str = "fuzzing") -> Outcome:
    """Some `cases` requests, made from the document, right ones and wrong ones."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.ndjson"
        words = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {server.key}", "--checks", ",".join(CHECKS)),
            *("--phases", phases, "--mode", "all", "--max-examples", str(-(-cases // SHARES))),
            *("--seed", str(seed), "--workers", "1", "--request-timeout", str(TIMEOUT_SECONDS)),
            *("--suppress-health-check", "all", "--warnings", "off", "--continue-on-failure", "--no-shrink"),
            *("--report", "ndjson", "--report-ndjson-path", str(report)),
        ]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.cluster.fuzz_hooks", "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(words, capture_output=True, text=True, cwd=directory, env=os.environ | hooks)
        lines = report.read_text().splitlines() if report.exists() else []
    return Outcome(done.returncode == 0, statuses_in(lines), done.stdout + done.stderr)


def statuses_in(report: list[str]) -> Counter[int]:
    """Statuses of all answers in a report of schemathesis; 0 for a request that none came to."""
    found: Counter[int] = Counter()
    for line in report:
        recorded = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
        for interaction in recorded.get("interactions", {}).values():
            found[(interaction.get("response") or {}).get("status_code", 0)] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, guarded_server(Path(directory)) as server:
        # More than half of them come from the other phase, which goes through the document field by field.
        outcome = fuzz(server, chosen.cases // 2, chosen.seed, "coverage,fuzzing")
    print(outcome.printed)
    print(f"{outcome.cases} requests; answers by status: {dict(sorted(outcome.statuses.items()))}")
    sys.exit(not outcome.passed or outcome.cases < chosen.cases)


if __name__ == "__main__":
    main()
