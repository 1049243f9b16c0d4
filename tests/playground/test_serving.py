"""What the playground's ASGI application answers, mounted as Ray Serve mounts it: the prefix as the root path."""

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from playground.files import read_files
from playground.page import application, page

HOST = re.compile(r"""(?:src|href|content)=["'](?:https?:)?//([^"'/]+)""")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(application(), root_path="/playground", follow_redirects=False) as client:
        yield client


def test_the_address_without_its_last_slash(client: TestClient) -> None:
    answer = client.get("/playground?x=1")
    assert answer.status_code == 307
    assert answer.headers["location"] == "playground/?x=1", "relative, whatever host and scheme a proxy shows"


def test_the_page_is_ours_and_names_no_other_host(client: TestClient) -> None:
    answer = client.get("/playground/", headers={"Accept-Encoding": "gzip, br"})
    assert answer.status_code == 200
    assert set(HOST.findall(answer.text)) <= {"testserver"}
    assert "og:" not in answer.text
    assert 'rel="manifest"' not in answer.text
    assert answer.text.count("<title>") == 1
    head = answer.text.split("</head>")[0]
    for name in re.findall(r'(?:href|src)="(files/[^"]+)"', head):
        assert client.get(f"/playground/{name}").status_code == 200, name
    assert answer.headers["cache-control"] == "no-cache"
    assert "default-src 'self'" in answer.headers["content-security-policy"]


def test_a_script_is_kept_for_good_under_an_address_of_its_own(client: TestClient) -> None:
    files = read_files()
    answer = client.get(f"/playground/{files.address}/chat.js")
    assert answer.content == files.served["chat.js"].content
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in answer.headers["cache-control"]
    assert client.get(f"/playground/{files.address}/none.js").status_code == 404
    assert client.get(f"/playground/{files.address}/..%2fapp.py").status_code == 404
    assert client.get("/playground/files/0123456789abcdef/chat.js").status_code == 404


def test_every_script_that_is_imported_is_served_and_loaded_ahead(client: TestClient) -> None:
    files = read_files()
    scripts = {name: file.content.decode() for name, file in files.served.items() if name.endswith(".js")}
    imported = {name for text in scripts.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert imported <= scripts.keys()
    assert all(f"{files.address}/{name}" in files.head for name in files.served)


def test_the_markup_is_a_constant_without_template_signs() -> None:
    """Gradio runs it through Handlebars and as a template literal; signs of either would be read as code."""
    markup = read_files().markup
    assert not re.search(r"[`\\]|\$\{|\{\{|@children", markup)


def test_gradio_keeps_nothing_and_calls_nobody() -> None:
    blocks = page(read_files())
    assert blocks.analytics_enabled is False
    (component,) = [one for one in blocks.blocks.values() if one.get_block_name() == "html"]
    assert component.value is None
    assert component.props == {}
    assert blocks.fns == {}, "no event handler: no text of a visitor or a model passes the server"


def test_a_stranger_cannot_upload(client: TestClient) -> None:
    answer = client.post("/playground/gradio_api/upload", files={"files": ("a.bin", b"x" * 4096)})
    assert answer.status_code >= 400
