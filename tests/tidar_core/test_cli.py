"""The `tidar` command as a user meets it: answers, help, one line for what can be mended."""

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tiny import edit_json, tiny_adapter, tiny_checkpoint
from tidar_core.cli import app


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli")
    tiny_checkpoint(directory / "tiny")
    tiny_adapter(directory / "drafter", directory / "tiny")
    return directory


def tidar(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


@pytest.mark.parametrize("command", [[], ["up"], ["generate"], ["status"], ["bench"], ["bench", "exact"]])
def test_help_says_what_each_command_is_for(command):
    result = tidar(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert len(result.output) > 200


@pytest.mark.parametrize(
    ("command", "default"), [("acceptance", "humaneval"), ("decode", "1, 8, 32"), ("steps", "all")]
)
def test_help_says_what_an_option_is_that_is_not_given(command, default):
    assert f"default: ({default})" in tidar("bench", command, "--help").output


def test_an_answer_is_the_same_with_and_without_drafts(model):
    answers = set()
    for drafts in ("off", "full"):
        result = tidar(
            "generate", "Who?", "--model", model / "tiny", "--adapter", model / "drafter", "--max-tokens", 30,
            "--drafts", drafts, "--dtype", "float32", "--plain",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        answers.add(result.stdout)
    assert len(answers) == 1
    assert answers.pop().strip()


def test_what_a_user_should_know_of_an_engine_is_told_beside_the_answer(model, tmp_path):
    tiny_checkpoint(tmp_path / "other", seed=1)
    asked = ["generate", "Who?", "--adapter", model / "drafter", "--max-tokens", 8, "--dtype", "float32", "--plain"]
    assert tidar(*asked, "--model", model / "tiny").stderr == ""
    told = tidar(*asked, "--model", tmp_path / "other")
    assert told.stderr.startswith("adapter drafter was made for other weights (tiny) than other")
    assert told.stderr.count("\n") == 1
    assert "adapter" not in told.stdout


def test_sampling_that_is_not_asked_for_is_as_the_models_makers_want_it(tmp_path):
    tiny_checkpoint(tmp_path / "tiny")
    edit_json(tmp_path / "tiny" / "generation_config.json", top_k=1)

    def said(*arguments: str | float) -> str:
        base = ["generate", "Who?", "--model", tmp_path / "tiny", "--adapter", "none", "--max-tokens", 30, "--plain"]
        result = tidar(*base, *arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    greedy, hot = said(), ["--temperature", 2]
    assert said(*hot) == greedy
    assert said(*hot, "--top-k", 0) == said(*hot, "--generation-config", "none") != greedy


def test_bench_decode_writes_a_record(model, tmp_path):
    record = tmp_path / "record.json"
    gc.unfreeze()  # what tests before have loaded
    result = tidar(
        "bench", "decode", "--model", model / "tiny", "--adapter", model / "drafter", "--batch", 2, "--rounds", 1,
        "--prompts", 2, "--max-tokens", 8, "--json", record,
    )  # fmt: skip
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert result.exit_code == 0, result.output
    assert frozen > 0, "the collector would walk through what was loaded"
    written = json.loads(record.read_text())
    assert {entry["drafts"] for entry in written["decode"]} == {"off", "auto", "full"}
    assert [entry["captured"] for entry in written["decode"]] == [[0]] * 3  # nothing is on a CPU
    assert written["engine"]["exact"] is True
    assert written["date"]


@pytest.mark.parametrize(("batch", "ways", "stopped"), [(2, 6, False), (2, 6, True), (1, 3, False)])
def test_bench_exact_keeps_what_it_has_found(model, tmp_path, monkeypatch, batch, ways, stopped):
    if stopped:
        monkeypatch.setattr("tidar_core.bench.exact.sampled_params", None)  # calling it fails
    record = tmp_path / "record.json"
    result = tidar(
        "bench", "exact", "--model", model / "tiny", "--adapter", model / "drafter", "--prompts", 2, "--batch", batch,
        "--max-tokens", 8, "--json", record,
    )  # fmt: skip
    assert (result.exit_code == 0) != stopped, result.output
    found = json.loads(record.read_text())["comparisons"]
    by_kind = Counter((one["rule"], one["against"]) for one in found)
    greedy = {("greedy", "transformers"): ways, ("greedy", "plain decoding"): ways - 1}
    assert by_kind == (greedy if stopped else greedy | {("sampled", "plain decoding"): ways - 1})
    assert all(one["equal"] == 2 for one in found)


def test_without_a_drafter_no_bench_says_that_drafts_were_compared(model, tmp_path):
    record = tmp_path / "record.json"
    plain = ["--model", model / "tiny", "--adapter", "none", "--max-tokens", 4]
    result = tidar("bench", "exact", *plain, "--prompts", 2, "--batch", 9, "--json", record)
    assert result.exit_code == 0, result.output
    assert "has no drafter" in result.stderr
    ways = {one["way"] for one in json.loads(record.read_text())["comparisons"]}
    assert ways == {"off, alone", "off, batch of 2"}
    result = tidar("bench", "acceptance", *plain)
    assert result.exit_code == 1
    assert "nothing would be drafted" in result.stderr


@pytest.mark.parametrize("rows", [1, 7])
def test_a_training_of_less_than_a_block_a_step_is_refused(model, rows):
    result = tidar("bench", "training", "--model", model / "tiny", "--rows", rows)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert f"--rows {rows} is less than one block of 8 slots" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", "/no/such/model"], "no model at '/no/such/model'"),
        (["--adapter", "/no/such/adapter"], "no adapter at /no/such/adapter"),
        (["--temperature", "-1"], "temperature must lie between"),
        (["caf\udce9"], "the prompt is not UTF-8"),
        (["--adapter", "none", "--drafts", "full"], "--drafts full needs a drafter"),
    ],
)
def test_what_the_user_can_mend_is_one_line(model, arguments, line):
    base = [] if "--model" in arguments else ["--model", model / "tiny"]
    base += [] if "--adapter" in arguments else ["--adapter", "none"]
    asked = [] if not arguments[0].startswith("--") else ["Who?"]
    result = tidar("generate", *asked, *base, *arguments)
    assert result.exit_code == 1
    assert line in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert "Traceback" not in result.output


def test_an_unknown_architecture_is_named(tmp_path):
    directory = tiny_checkpoint(tmp_path / "strange")
    edit_json(directory / "config.json", model_type="gpt2")
    result = tidar("generate", "Who?", "--model", directory)
    assert result.exit_code == 1
    assert "gpt2" in result.stderr
    assert result.stderr.strip().count("\n") == 0


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_status_without_a_server_is_one_line(address):
    result = tidar("status", "--address", address)
    assert result.exit_code == 1
    assert "nothing answers at http://127.0.0.1:9/" in result.stderr
    assert "tidar up" in result.stderr


def test_neither_the_engine_nor_its_tests_need_the_clusters_packages():
    """A machine with a GPU and without these measures and tests the engine."""
    absent = "sys.modules.update(dict.fromkeys(('ray', 'starlette', 'fastapi', 'openai', 'gradio')))"
    asked = f"import sys; {absent}; import tests.conftest, tidar_core.cli, tidar_core.engine"
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_package():
    assert tidar("--version").stdout.strip() == metadata.version("tidar-cluster")


def test_a_record_that_cannot_be_written_is_refused_at_the_start(model, tmp_path):
    result = tidar("bench", "acceptance", "--model", model / "tiny", "--json", tmp_path / "nowhere" / "record.json")
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_more_threads_than_any_machine_has_use_for_are_refused(model):
    result = tidar("generate", "Who?", "--model", model / "tiny", "--threads", 10**8)
    assert result.exit_code == 2
    assert "--threads" in result.stderr


def run_into(sink, command, model):
    """A command whose output goes to that file descriptor, which is closed here, as a process of its own: what Python
    says at its end counts too."""
    arguments = {
        "version": ["--version"],
        "help": ["bench", "--help"],
        "check": ["check", "manifests/serve/node-8gpu.yaml"],
        "generate": ["generate", "Who?", "--model", model / "tiny", "--adapter", "none", "--max-tokens", "8"],
    }[command]
    program = "from tidar_core.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=sink, stderr=subprocess.PIPE)
    os.close(sink)
    _, errors = process.communicate()
    return process.returncode, errors.decode().strip().splitlines()


@pytest.mark.parametrize("command", ["version", "help", "check", "generate"])
def test_results_that_find_no_room_are_one_line(model, command):
    status, lines = run_into(os.open("/dev/full", os.O_WRONLY), command, model)
    assert (status, len(lines)) == (1, 1)
    assert "the output cannot be written (No space left on device)" in lines[0]


@pytest.mark.parametrize("command", ["version", "help", "check", "generate"])
def test_results_that_nobody_reads_end_quietly(model, command):
    reader, writer = os.pipe()
    os.close(reader)
    status, lines = run_into(writer, command, model)
    assert (status, lines) == (1, [])


def test_what_is_opened_does_not_take_the_place_of_a_closed_stream(tmp_path):
    """As a service may be started: what is printed there would end up in a file or a connection."""
    code = "import os, subprocess, sys; from tidar_core.cli import fill_closed_streams as fill; fill(); "
    code += "file = open(sys.argv[1], 'w'); subprocess.run(['echo', 'printed']); os.write(2, b'said'); "
    code += "file.write(f'number {file.fileno()}')"
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, str(tmp_path / "file")]
    subprocess.run(words, check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "number 3"
