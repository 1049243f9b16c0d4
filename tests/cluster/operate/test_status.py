"""The status that goes on: what a server says in between is shown as it is."""

from io import StringIO
from unittest.mock import Mock

import pytest
from rich.console import Console

from cluster.operate import status
from tidar_core.config import ConfigError


def test_what_a_server_answers_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [
        status.Snapshot(0.0, {}),
        status.Snapshot(0.5, {}),
        ConfigError("answers 502: [/red] [bold]"),
        KeyboardInterrupt(),
    ]
    monkeypatch.setattr(status, "look", Mock(side_effect=looks))
    monkeypatch.setattr(status, "model_table", Mock(return_value=""))
    monkeypatch.setattr(status.time, "sleep", Mock())
    shown = StringIO()
    status.show_status("localhost:8000", live=True, console=Console(file=shown, force_terminal=True))
    assert "answers 502: [/red] [bold]" in shown.getvalue()
