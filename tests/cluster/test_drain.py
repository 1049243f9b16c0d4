"""What a drain waits for, where nobody can tell it for a while."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.state.exception import RayStateApiException

from cluster import drain


def test_a_head_that_starts_anew_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A pod's preStop hook that failed there would end its streams at once."""
    replica, other = SimpleNamespace(class_name="ServeReplica:api:Engine"), SimpleNamespace(class_name="Board")
    answers: list[Any] = [[replica, other], RayStateApiException("no\nanswer"), [replica], [other]]

    def answer(**_: Any) -> Any:
        said = answers.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(drain, "list_actors", answer)
    monkeypatch.setattr(drain, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(drain.ray, "init", lambda **_: None)
    monkeypatch.setattr(drain.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
    monkeypatch.setattr(drain.subprocess, "run", lambda *_, **__: None)
    assert drain.drain(60, "node")
    said = capsys.readouterr().out.splitlines()
    assert said == ["draining: ServeReplica:api:Engine", "what is left is not known now: no answer"]
