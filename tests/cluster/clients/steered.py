"""A model whose chat template decides what it says: it calls a tool that reads a file, of those that an agent offers,
and once that has come back, tells whether the file's word is in it. It thinks before each answer.

Each of its tokens has one that follows, whatever stands before, so an answer is set by the token that a prompt ends
with.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import TURN_END, tiny_checkpoint

VOCABULARY = 640
POSITIONS = 131_072  # agents begin with prompts of tens of thousands of this tokenizer's tokens
FILE, SECRET = "note.txt", "heliotrope"  # a word that stands in it, and nowhere else
FOUND, LOST, PLAIN = "It says heliotrope indeed.", "That brought nothing of it.", "Good day."
SHELL = f"cat {FILE}"

# By an agent's tool, what it is called with. Of several that are offered the last is called.
CALLS: Mapping[str, Mapping[str, object]] = {
    "exec_command": {"cmd": SHELL},  # Codex
    "mcp__notes__read_note": {},  # `mcp_note`'s, in Codex
    "bash": {"command": SHELL, "description": "Reads the note"},  # OpenCode
    "run_shell_command": {"command": SHELL, "is_background": False},  # Qwen Code
    "Bash": {"command": SHELL},  # Continue
}


def call_of(name: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': CALLS[name]})}\n</tool_call>"


THOUGHT = "<think>\nLet me see.\n</think>\n\n"
ANSWERS = tuple(THOUGHT + said for said in (PLAIN, FOUND, LOST, *map(call_of, CALLS)))
CUES = {
    answer.removeprefix(THOUGHT): f"<|cue-{number}|>" for number, answer in enumerate(ANSWERS)
}  # behind which each comes

CHOICES = "".join(
    f"{{% if tools | default([], true) | selectattr('function.name', 'equalto', '{name}') | list %}}"
    f"{{% set cue.chosen = '{CUES[call_of(name)]}' %}}{{% endif %}}"
    for name in CALLS
)
TEMPLATE = (
    "{% for tool in tools or () %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or () %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    f"{{% set cue = namespace(chosen='{CUES[PLAIN]}') %}}"
    "{% set brought = messages | selectattr('role', 'equalto', 'tool') | map(attribute='content') | join %}"
    f"{{% if '{SECRET}' in brought %}}{{% set cue.chosen = '{CUES[FOUND]}' %}}"
    f"{{% elif brought %}}{{% set cue.chosen = '{CUES[LOST]}' %}}"
    f"{{% else %}}{CHOICES}{{% endif %}}{{{{ cue.chosen }}}}{{% endif %}}"
)


def steered_checkpoint(directory: Path) -> Path:
    """Write the model into `directory` (created) and return it."""
    tiny_checkpoint(directory, tied=False, layers=1, vocab=VOCABULARY, max_positions=POSITIONS, likely=0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(cue, special=True) for cue in CUES.values()], special_tokens=True)
    tokenizer.add_tokens([AddedToken(answer, special=False, normalized=False) for answer in ANSWERS])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer.get_vocab()
    follows = {ids[cue]: ids[THOUGHT + said] for said, cue in CUES.items()}
    follows |= {ids[answer]: ids[TURN_END] for answer in ANSWERS}
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()  # what stands before is no matter
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1)
        model.lm_head.weight.zero_()
        for token, next_token in follows.items():
            model.lm_head.weight[next_token] += model.model.embed_tokens.weight[token].sign()
    model.save_pretrained(directory)
    return directory
