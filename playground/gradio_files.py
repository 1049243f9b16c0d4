"""Gradio's own files that its page loads as it starts: named to the browser at once, its style sheets as one.

Gradio asks for them in four waves, each known only when scripts of the one before have run, and every request passes
Ray Serve's proxy, which costs more than the file. The names are read off Gradio's own scripts; where another version
writes them differently, fewer are found, and Gradio asks for the others as it always does.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from playground.files import MEDIA_TYPES, StaticFile

ENTRY = re.compile(r'<script type="module"[^>]* src="\./assets/([\w.-]+)"')
NAMES = re.compile(r"\bm\.f=(\[[^\]]*\])")  # all files that a script may ask for; imports give places in this list
IMPORT = r"import\(`\./([\w.-]+)`\)[^()]*(?:\([^()]*\))?,__vite__mapDeps\(\[([\d,]*)\]\)"
COMPONENT = r"[{,]%s:\{.*?\bcomponent:\(\)=>\w+\(\(\)=>" + IMPORT
COMPONENTS = ("column", "html")  # Blocks stands in a column
FIRST_PARTS, PAGE_PART, REGISTRY = ("Index-", "core-"), "Blocks-", "core-"
OWN_ADDRESS = re.compile(r"url\(|@import")  # such a sheet must stay where it is


@dataclass(frozen=True)
class GradioFiles:
    """`scripts`: names of modules in Gradio's `assets` folder, but for the one that Gradio's page names itself.
    `sheets`: those of its style sheets, which `sheet` has as one. `served`: address relative to the page -> what is
    sent, of the modules and of the one sheet."""

    scripts: tuple[str, ...] = ()
    sheets: tuple[str, ...] = ()
    sheet: str = ""
    served: Mapping[str, StaticFile] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """Tags for the page's head. A sheet that is linked, be it disabled, is not asked for by Gradio again."""
        modules = [f'<link rel="modulepreload" crossorigin href="./assets/{name}">' for name in self.scripts]
        linked = [f'<link rel="stylesheet" disabled href="./assets/{name}">' for name in self.sheets]
        one = [f'<link rel="stylesheet" href="{self.sheet}">'] if self.sheets else []
        return "\n".join([*one, *linked, *modules, ""])


def read_gradio_files(frontend: Path) -> GradioFiles:
    """The files that a page of `COMPONENTS` needs, from the folder that holds Gradio's `index.html`."""
    assets = frontend / "assets"
    entry = ENTRY.search((frontend / "index.html").read_text("utf-8"))
    if entry is None:
        return GradioFiles()
    chunk = entry[1].rpartition("-")[0]  # its sheet, named in the page too, has the same name with another digest
    found = [name for name in dict.fromkeys(_startup(assets, entry[1])) if name.rpartition("-")[0] != chunk]
    texts = {name: (assets / name).read_text("utf-8") for name in found if name.endswith(".css")}
    sheets = tuple(name for name, text in texts.items() if not OWN_ADDRESS.search(text))
    scripts = tuple(name for name in found if name.endswith(".js"))
    served = {f"assets/{name}": _file(assets / name) for name in (entry[1], *scripts)}
    text = "\n".join(texts[name] for name in sheets).encode()
    sheet = f"files/gradio-{hashlib.sha256(text).hexdigest()[:16]}.css"
    return GradioFiles(scripts, sheets, sheet, {**served, sheet: StaticFile(text, MEDIA_TYPES[".css"])})


def _file(path: Path) -> StaticFile:
    return StaticFile(path.read_bytes(), MEDIA_TYPES[path.suffix])


def _startup(assets: Path, entry: str) -> Iterator[str]:
    first = list(_imported(assets / entry, IMPORT, FIRST_PARTS))
    yield from first
    for name in first:
        if name.startswith(FIRST_PARTS[0]) and name.endswith(".js"):
            yield from _imported(assets / name, IMPORT, (PAGE_PART,))
    for name in first:
        if name.startswith(REGISTRY) and name.endswith(".js"):
            for kind in COMPONENTS:
                yield from _imported(assets / name, COMPONENT % kind, ("",))


def _imported(script: Path, pattern: str, starts: tuple[str, ...]) -> Iterator[str]:
    """What `script` asks for where it imports, as `pattern` finds it, a file whose name starts so."""
    text = script.read_text("utf-8")
    listed = NAMES.search(text)
    names = [name.removeprefix("./") for name in json.loads(listed[1])] if listed else []
    for name, places in re.findall(pattern, text):
        if name.startswith(starts):
            yield from (names[int(place)] for place in places.split(",") if place and int(place) < len(names))
