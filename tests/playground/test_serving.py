"""What the playground's ASGI application answers, mounted as Ray Serve mounts it: the prefix as the root path."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from playground.files import SHEETS, one_script, read_files
from playground.gradio_files import read_gradio_files
from playground.page import QUEUE_SECONDS, application, page

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


def test_the_page_works_under_whatever_host_a_proxy_shows(client: TestClient) -> None:
    text = client.get("/playground/", headers={"Host": "backend:8000"}).text
    assert "backend" not in text
    assert '"root":"."' in text


def test_a_page_that_nobody_looks_at_leaves_the_processor_alone(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[float] = []
    sleep = asyncio.sleep

    def counted(seconds: float, *args: object) -> object:
        sleeps.append(seconds)
        return sleep(seconds, *args)

    monkeypatch.setattr(asyncio, "sleep", counted)
    time.sleep(2.5)
    deadline = time.monotonic() + 30
    while QUEUE_SECONDS not in sleeps and time.monotonic() < deadline:
        time.sleep(0.1)
    assert QUEUE_SECONDS in sleeps
    assert min(sleeps) >= 0.1  # as a server beside it in this process sleeps


def test_a_script_is_kept_for_good_under_an_address_of_its_own(client: TestClient) -> None:
    files = read_files()
    answer = client.get(f"/playground/{files.address}/chat.js")
    assert answer.content == files.served["chat.js"].content
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in answer.headers["cache-control"]
    assert client.get(f"/playground/{files.address}/none.js").status_code == 404
    assert client.get(f"/playground/{files.address}/..%2fapp.py").status_code == 404
    assert client.get("/playground/files/0123456789abcdef/chat.js").status_code == 404


def test_gradios_files_are_named_in_the_page_and_the_same(client: TestClient) -> None:
    import gradio

    frontend = Path(gradio.__file__).parent / "templates" / "frontend"
    found = read_gradio_files(frontend)
    assert {name.partition("-")[0] for name in found.scripts} >= {"Index", "core", "Blocks", "HTML"}
    assert len(found.sheets) > 5
    head = client.get("/playground/").text.split("</head>")[0]
    assert found.sheet in head
    for name in found.scripts:
        assert f'<link rel="modulepreload" crossorigin href="./assets/{name}">' in head
        answer = client.get(f"/playground/assets/{name}", headers={"Accept-Encoding": "gzip"})
        assert answer.content == (frontend / "assets" / name).read_bytes(), name
    sheet = client.get(f"/playground/{found.sheet}").text
    for name in found.sheets:
        assert (frontend / "assets" / name).read_text("utf-8") in sheet, name


def test_where_gradio_is_built_otherwise_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<script src="main.js"></script>')
    assert read_gradio_files(tmp_path).head.strip() == ""


def test_all_modules_are_one_script_and_all_sheets_one_sheet() -> None:
    files = read_files()
    script = files.served["all.js"].content.decode()
    modules = {name: file.content.decode() for name, file in files.served.items() if name.endswith(".js")}
    for name in modules.keys() - {"all.js", "theme.js"}:
        *_, last = (line for line in modules[name].splitlines() if line)
        assert last.removeprefix("export ") in script, name
    assert re.findall(r"^(?:import|export)\b.*", script, re.MULTILINE) == ["export { start };"]
    declared = re.findall(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", script, re.MULTILINE)
    assert [name for name, count in Counter(declared).items() if count > 1] == [], "they share one scope"
    sheets = {name for name in files.served if name.endswith(".css")} - {"all.css"}
    assert sheets == {f"{name}.css" for name in SHEETS}, "a sheet without a place would never be seen"


def test_a_module_comes_behind_what_it_imports() -> None:
    one = one_script(
        {"a.js": 'import { b } from "./b.js";\n\nexport const start = b;\n', "b.js": "export const b = 1;\n"}
    )
    assert one.index("const b") < one.index("const start")
    with pytest.raises(CycleError):
        one_script({"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'})
    with pytest.raises(KeyError):
        one_script({"a.js": 'import { b } from "./none.js";\n'})


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
    assert blocks.get_config_file()["connect_heartbeat"] is False, "an idle tab holds no request open"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "gradio_api/upload", 404),
        ("POST", "gradio_api/queue/join", 404),
        ("POST", "gradio_api/run/predict", 404),
        ("GET", "gradio_api/heartbeat/x", 404),  # a connection without an end
        ("GET", "gradio_api/file=/etc/hostname", 404),
        ("GET", "files", 404),
        ("POST", "", 405),
        ("POST", "files/all.js", 405),
        ("GET", "gradio_api/info", 200),
        ("GET", "config", 200),
    ],
)
def test_a_stranger_gets_nothing_of_gradios_but_what_the_page_uses(
    client: TestClient, method: str, path: str, status: int
) -> None:
    """Bodies of any size, files and connections would fill the memory and disk of a node that decodes as well."""
    answer = client.request(method, f"/playground/{path}", content=b"x" * 4096 if method == "POST" else None)
    assert answer.status_code == status
    assert answer.headers["content-security-policy"]
