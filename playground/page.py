"""The Gradio page, and the ASGI application that serves it with its scripts."""

import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response

from playground.files import PageFiles, StaticFile, read_files
from playground.gradio_files import read_gradio_files
from playground.shell import Shell
from tidar_core.imports import quick_imports

if TYPE_CHECKING:
    import gradio

TITLE = "TiDAR playground"
SANS = ["system-ui", "sans-serif"]  # the visitor's own fonts: none is loaded from anywhere
MONO = ["ui-monospace", "monospace"]
QUEUE_SECONDS = 1.0
FOREVER = "public, max-age=31536000, immutable"

# Runs in the browser as the page appears. Nothing but constants of this package enters it.
START_SCRIPT = """
import(new URL("%s/all.js", document.baseURI))
  .then((page) => page.start(element))
  .catch((error) => {
    console.error(error);
    element.textContent = "The page's scripts could not be loaded. Please reload the page.";
  });
"""


@contextlib.contextmanager
def quick_gradio() -> Iterator[None]:
    """Gradio, imported within this, takes half of its time: as `quick_imports`, and it writes no stubs of its
    components for editors, which it compares with its own files at every import.
    """
    where_written = inspect.getfile

    def but_for_components(object: Any) -> str:
        if inspect.isclass(object) and object.__module__.startswith("gradio."):
            raise OSError(f"{object} stands in no file")  # what Gradio makes of it: a component without stubs
        return where_written(object)  # others ask too, who are not told at all that there may be none

    inspect.getfile = but_for_components
    try:
        with quick_imports():
            yield
    finally:
        inspect.getfile = where_written


def page(files: PageFiles) -> "gradio.Blocks":
    """The page as Gradio blocks: one HTML component with constant markup, brought to life by `static/page.js`."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
    with quick_gradio():
        import gradio

    with gradio.Blocks(analytics_enabled=False, title=TITLE, fill_width=True) as blocks:
        gradio.HTML(
            html_template=files.markup,
            js_on_load=START_SCRIPT % files.address,
            apply_default_css=False,
            elem_id="chat",
        )
    return blocks


def application() -> FastAPI:
    """The playground as an ASGI application, to be mounted under a path of its own beside `/v1`."""
    files = read_files()
    blocks = page(files)
    import gradio

    gradios = read_gradio_files(Path(gradio.__file__).parent / "templates" / "frontend")
    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get(f"/{files.address}/{{name}}")
    async def static_file(name: str, request: Request) -> Response:
        return _answer(files.served.get(name), request)

    for address, file in gradios.served.items():
        app.add_route(f"/{address}", partial(_gradios_file, file))

    gradio.mount_gradio_app(
        app,
        blocks,
        path="/",
        theme=gradio.themes.Base(font=SANS, font_mono=MONO),
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        max_file_size=1,  # the page takes no uploads, so a stranger shall not fill the disk with them
    )
    app.add_middleware(Shell, head=files.head + gradios.head)
    # No event of the page ever gets into Gradio's queue, which looks a thousand times a second whether there is one.
    blocks._queue.sleep_when_free = blocks._queue.progress_update_sleep_when_free = QUEUE_SECONDS
    return app


async def _gradios_file(file: StaticFile, request: Request) -> Response:
    return _answer(file, request)


def _answer(file: StaticFile | None, request: Request) -> Response:
    if file is None:
        raise HTTPException(404, "no such file")
    headers = {"Cache-Control": FOREVER, "Vary": "Accept-Encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.content, media_type=file.media_type, headers=headers)
    return Response(file.packed, media_type=file.media_type, headers={**headers, "Content-Encoding": "gzip"})


def mount(app: FastAPI, path: str = "/playground") -> FastAPI:
    """Mount the playground in `app`, which serves `/v1` itself: for development, under uvicorn and without Ray."""
    playground = application()
    outer_lifespan = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(outer: FastAPI) -> AsyncIterator[Mapping[str, Any] | None]:
        async with outer_lifespan(outer) as state, playground.router.lifespan_context(playground):
            yield state

    app.router.lifespan_context = lifespan  # type: ignore[assignment]
    app.mount(path, playground)
    return app
