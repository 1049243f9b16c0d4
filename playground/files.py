"""The page's static files: read once at start-up, served under an address that changes with their content.

Every request passes Ray Serve's proxy, which costs more than the file: so the page loads one script and one sheet,
made of all of them. Each module is served by itself too, as the tests of one want it.
"""

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from importlib import resources

MEDIA_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}
FIRST_SCRIPT = "theme.js"  # runs before the page is drawn; all others are modules
SCRIPT, SHEET = "all.js", "all.css"
SHEETS = ("frame", "controls", "side", "talk", "hint", "charts", "views", "figure", "adapt")  # later ones win
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const)\b)", re.MULTILINE)
START = "start"  # what the page calls


@dataclass(frozen=True)
class StaticFile:
    """What is sent for one file: its bytes and its media type. `packed`: the bytes as gzip has them."""

    content: bytes
    media_type: str

    @cached_property
    def packed(self) -> bytes:
        return gzip.compress(self.content, mtime=0)


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


def one_script(modules: Mapping[str, str]) -> str:
    """All modules in one scope, each behind those that it imports, so their top-level names must differ. Raises
    graphlib.CycleError where two import each other, KeyError where one imports a file that is not there."""
    order = TopologicalSorter({name: IMPORT.findall(text) for name, text in modules.items()}).static_order()
    bodies = [EXPORT.sub("", IMPORT.sub("", modules[name])) for name in order]
    return "\n".join([*bodies, f"export {{ {START} }};\n"])


def read_files() -> PageFiles:
    """The files in `static/`, as they were installed with the package."""
    folder = resources.files("playground") / "static"
    served = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            served[entry.name] = StaticFile(entry.read_bytes(), MEDIA_TYPES[suffix])
    modules = {name: served[name].content.decode() for name in served if name.endswith(".js") and name != FIRST_SCRIPT}
    served[SCRIPT] = StaticFile(one_script(modules).encode(), MEDIA_TYPES[".js"])
    sheet = b"\n".join(served[f"{name}.css"].content for name in SHEETS)
    served[SHEET] = StaticFile(sheet, MEDIA_TYPES[".css"])
    digest = hashlib.sha256(b"".join(name.encode() + file.content for name, file in served.items())).hexdigest()[:16]
    address = f"files/{digest}"
    first = served[FIRST_SCRIPT].content.decode()
    head = (folder / "head.html").read_text("utf-8").replace("{files}", address).replace("{first}", first)
    page = (folder / "page.html").read_text("utf-8")
    markup = re.sub(r"\{(\w+\.html)\}", lambda part: (folder / part[1]).read_text("utf-8"), page)
    return PageFiles(served, address, markup, head)
