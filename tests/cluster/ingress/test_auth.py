"""Keys open what they are for, and nothing but the page's way in and the health is open without one."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from cluster.carry.directory import Directory
from cluster.ingress.api import build_api
from cluster.ingress.auth import LOOK_SECONDS, KeyFile, Keys, digest, read_keys, route_of
from cluster.options import ServeOptions
from tests.cluster.ingress.test_api import NoReplica
from tidar_core.config import ConfigError


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    (tmp_path / "keys").write_text("# tenants\nfirst-key\n\n  second-key  \n")
    (tmp_path / "metrics").write_text("scraper\n")
    options = ServeOptions(api_keys=str(tmp_path / "keys"), metrics_keys=str(tmp_path / "metrics"))
    return TestClient(build_api({"tiny": Directory(NoReplica())}, options), follow_redirects=False)  # type: ignore[arg-type]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/no/such/route"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_wants_a_key(client: TestClient, method: str, path: str) -> None:
    for headers in ({}, bearer("wrong"), bearer(""), {"Authorization": "first-key"}, bearer("first-key ' or 1")):
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for key in ("scraper",) if path == "/metrics" else ("first-key", "second-key"):
        assert client.request(method, path, headers=bearer(key)).status_code != 401


def test_keys_of_one_kind_do_not_open_the_other(client: TestClient) -> None:
    assert client.get("/metrics", headers=bearer("first-key")).status_code == 401
    assert client.get("/v1/models", headers=bearer("scraper")).status_code == 401


def test_the_page_and_the_health_are_open(client: TestClient) -> None:
    assert client.get("/health").status_code == 503  # no replica, but no key either
    assert client.get("/").status_code == 307


def test_without_keys_everything_is_open_and_metrics_follow_the_api() -> None:
    assert Keys().admit("/v1/models", None)
    one = Keys(api=(digest("a"),))
    assert not one.admit("/metrics", None)
    assert one.admit("/metrics", "a")


@pytest.mark.parametrize("content", [None, "", "# none yet\n"])
def test_a_key_file_of_no_use_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="key file"):
        read_keys(str(path))


def test_a_key_that_no_header_brings_is_refused_without_telling_it(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfine\nschlüssel\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^line 3 of the key file") as caught:
        read_keys(str(path))
    assert "schl" not in str(caught.value)


def test_a_key_that_is_taken_out_of_its_file_opens_nothing_any_more(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.ingress.auth.LOOK_SECONDS", 0.0)

    def opens(key: str) -> bool:
        return client.get("/v1/no/such/route", headers=bearer(key)).status_code != 401

    assert opens("first-key")
    (tmp_path / "new").write_text("second-key\nthird-key\n")
    (tmp_path / "new").replace(tmp_path / "keys")
    assert [opens(key) for key in ("first-key", "second-key", "third-key")] == [False, True, True]
    (tmp_path / "keys").write_text("# none\n")
    assert [opens(key) for key in ("first-key", "third-key", "")] == [False, True, False]
    (tmp_path / "keys").unlink()
    assert [opens(key) for key in ("first-key", "third-key", "")] == [False, True, False]
    (tmp_path / "keys").write_text("first-key\n")
    assert [opens(key) for key in ("first-key", "third-key")] == [True, False]


def test_a_key_file_is_looked_at_once_a_while(tmp_path: Path) -> None:
    now = [0.0]
    (tmp_path / "keys").write_text("a\n")
    file = KeyFile(str(tmp_path / "keys"), lambda: now[0])
    (tmp_path / "keys").write_text("other\n")
    assert file.keys() == (digest("a"),)
    now[0] += LOOK_SECONDS
    assert file.keys() == (digest("other"),)


def test_a_key_file_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("cluster.ingress.auth.LOOK_SECONDS", 0.0)
    (tmp_path / "keys").write_text("a\n")
    assert read_keys("~/keys") == (digest("a"),)
    file = KeyFile("~/keys")
    (tmp_path / "keys").write_text("other\n")
    assert file.keys() == (digest("other"),)


def test_an_editors_mark_at_a_files_start_is_no_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key\nsecond-key\n", encoding="utf-8-sig")
    assert read_keys(str(tmp_path / "keys")) == (digest("first-key"), digest("second-key"))


@pytest.mark.parametrize("header", ["bearer first-key", "BEARER first-key", "Bearer  first-key", "Bearer first-key "])
def test_a_key_may_be_written_as_http_allows(client: TestClient, header: str) -> None:
    assert client.get("/v1/models", headers={"Authorization": header}).status_code != 401


def test_a_prefix_of_the_application_opens_and_closes_nothing(tmp_path: Path) -> None:
    """As where a Serve config puts it under a `route_prefix`, beside others."""
    (tmp_path / "metrics").write_text("scraper\n")
    api = build_api({"tiny": Directory(NoReplica())}, ServeOptions(metrics_keys=str(tmp_path / "metrics")))  # type: ignore[arg-type]
    client = TestClient(api, root_path="/llm", follow_redirects=False)
    assert client.get("/llm/metrics").status_code == 401
    assert client.get("/llm/metrics", headers=bearer("scraper")).status_code == 503  # no replica, but a key
    assert client.get("/llm/health").status_code == 503
    for root, path, route in (
        ("/llm", "/llm", "/"),
        ("/llm", "/llmetrics", "/llmetrics"),
        ("", "/metrics", "/metrics"),
    ):
        assert route_of({"root_path": root, "path": path}) == route
