"""llm, the command line, with a model of its `extra-openai-models.yaml`."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asking import ASK, SERVED, run


def said(*words, key=SERVED.key):
    with tempfile.TemporaryDirectory() as home:
        described = [f"- model_id: ours\n  model_name: {SERVED.model}\n  api_base: {SERVED.url}\n"]
        described.append("  supports_tools: true\n  supports_schema: true\n  api_key_name: ours\n")
        Path(home, "extra-openai-models.yaml").write_text("".join(described))
        environment = os.environ | {"LLM_USER_PATH": home, "NO_COLOR": "1"}
        options = ["--key", key, "-o", "temperature", "0", "-o", "max_tokens", "200"]
        told = [sys.executable, "-m", "llm", "-m", "ours", *options, *words]
        done = subprocess.run(told, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def chat():
    whole = said("--no-stream", "--usage", ASK)
    assert "Token usage" in whole, whole
    assert whole.split("Token usage")[0].strip() == said(ASK).strip()


def chat_structured():
    assert '"good"' in said("--schema", "good bool", ASK)


def chat_tools():
    assert "Error" not in (told := said("-T", "llm_version", "--td", ASK)), told


def errors():
    assert "401" in (told := said(ASK, key="another")), told


if __name__ == "__main__":
    run("llm", chat, chat_structured, chat_tools, errors)
