"""Environments of clients, made where they are missing."""

import json
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

INSTALL_SECONDS = 900
NODE = "node@22"  # Node itself, from npm: the newest packages want a newer one than is often installed


def run(words: Sequence[str], directory: Path, seconds: float = 600) -> str:
    """What a program printed. Raises where it failed."""
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def python_with(packages: Sequence[str], place: Path) -> Path | None:
    """The Python of an environment, made where it is missing; None where it is, and nothing is to be in it."""
    python = place / "bin" / "python"
    if not python.exists() and packages:
        venv.create(place, with_pip=True)
        run([str(python), "-m", "pip", "install", "--quiet", *packages], place, INSTALL_SECONDS)
    return python if python.exists() else None


def modules_with(packages: Sequence[str], place: Path) -> Path:
    """The node_modules of a folder with Node and npm packages, made where it is missing."""
    modules = place / "node_modules"
    if not (modules / ".package-lock.json").exists():  # which npm writes last
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text(json.dumps({"private": True}))
        # By their tag: of several versions npm else takes one that suits the Node that it runs on itself.
        newest = [f"{package}@latest" for package in packages]
        run(["npm", "install", "--no-audit", "--no-fund", NODE, *newest], place, INSTALL_SECONDS)
    return modules
