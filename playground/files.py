"""The page's static files: read once at start-up, served under an address that changes with their content."""

import hashlib
import re
from dataclasses import dataclass
from importlib import resources

MEDIA_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
FIRST_SCRIPT = "theme.js"  # runs before the page is drawn; all others are modules, loaded ahead


@dataclass(frozen=True)
class StaticFile:
    """What is sent for one file: its bytes and its media type."""

    content: bytes
    media_type: str


@dataclass(frozen=True)
class PageFiles:
    """Everything that the page is made of.

    `served` maps a file name to what is sent for it. `address` is where, relative to the page: it holds a digest of
    all served files, so that browsers may keep them for good and a new version is never mixed with an old one.
    `markup` is the page's HTML, the parts of `page.html` filled in, and `head` the tags for its `<head>`,
    addresses filled in.
    """

    served: dict[str, StaticFile]
    address: str
    markup: str
    head: str


def read_files() -> PageFiles:
    """The files in `static/`, as they were installed with the package."""
    folder = resources.files("playground") / "static"
    served = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            served[entry.name] = StaticFile(entry.read_bytes(), MEDIA_TYPES[suffix])
    digest = hashlib.sha256(b"".join(name.encode() + file.content for name, file in served.items())).hexdigest()[:16]
    address = f"files/{digest}"
    scripts = [name for name in served if name.endswith(".js") and name != FIRST_SCRIPT]
    ahead = "\n".join(f'<link rel="modulepreload" href="{address}/{name}">' for name in scripts)
    head = (folder / "head.html").read_text("utf-8").replace("{files}", address).replace("{scripts}", ahead)
    page = (folder / "page.html").read_text("utf-8")
    markup = re.sub(r"\{(\w+\.html)\}", lambda part: (folder / part[1]).read_text("utf-8"), page)
    return PageFiles(served, address, markup, head)
