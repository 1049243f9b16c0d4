"""Chat templates of all sorts: where a user's words end, and what is told where a model asks itself nothing."""

import itertools

import pytest
from tokenizers import AddedToken

from tests.tidar_core.convert.documents import HEADER
from tests.tidar_core.convert.trained import BRIEF, SMALL, run_command
from tests.tiny import tiny_checkpoint, tiny_tokenizer
from tidar_core.config import EngineConfig
from tidar_core.convert import own_words
from tidar_core.convert.conversations import Conversation, DocumentPlan, plan_job
from tidar_core.convert.own_words import GatherProgress, Goal, gather_own_words
from tidar_core.convert.shards import open_store
from tidar_core.convert.sources import Completion, EngineSource
from tidar_core.convert.template import encode, open_user_turn
from tidar_core.engine import load_engine

SHORT = DocumentPlan(seed=0, chat=True, question_tokens=24, answer_tokens=32, longest=512)
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% else %}"
    "{{ '<｜Assistant｜>' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}{% else %}"
    "{{ 'ASSISTANT: ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
ALPACA = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant: \nSure\n' }}{% endif %}"
)


def tokenizer_of(template: str):
    """Its tokens of roles are added ones and not special, as DeepSeek's."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(role, special=False) for role in ("<｜User｜>", "<｜Assistant｜>", "<think>")])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "ends", "stop"),
    [
        (DEEPSEEK, ("<｜Assistant｜>",), ()),
        (DEEPSEEK.replace("'<｜Assistant｜><", "'\n<｜Assistant｜><"), ("<｜Assistant｜>",), ()),
        (DEEPSEEK.replace("add_generation_prompt", "false"), (), ()),
        (VICUNA, (), ("ASSISTANT:",)),
        (ALPACA, (), ("### assistant:",)),
        (VICUNA.replace("add_generation_prompt", "false"), (), ()),
        (ALPACA.replace("add_generation_prompt", "false"), (), ("\n",)),
    ],
)
def test_a_users_words_end_where_an_answer_would_begin(template, ends, stop):
    """Where the template has nothing behind them, or a space, at which no question ends."""
    tokenizer = tokenizer_of(template)
    turn = open_user_turn(tokenizer, [])
    assert turn.stop_ids == {2, *tokenizer.convert_tokens_to_ids(list(ends))}
    assert turn.stop == stop


def test_a_model_whose_roles_are_no_special_tokens_asks_and_answers():
    tokenizer = tokenizer_of(DEEPSEEK)
    job = next(job for number in itertools.count() if (job := plan_job(SHORT, number)).kind == "chat")
    conversation = Conversation(job, SHORT, tokenizer, set())
    wish = conversation.start()
    asked = (*encode(tokenizer, "What is the answer?"), tokenizer.convert_tokens_to_ids("<｜Assistant｜>"))
    assert asked[-1] in wish.params.stop_token_ids
    wish = conversation.advance(Completion(0, asked, True))
    text = tokenizer.decode(list(wish.prompt))
    assert text.startswith(f"<｜User｜>{job.opening}")
    assert text.endswith("What is the answer?<｜Assistant｜><think>\n")


@pytest.mark.parametrize("judged", [10, 10**6])
def test_a_model_that_asks_itself_nothing_is_told_of(tmp_path, monkeypatch, judged):
    """While it is asked, or at the end where there was too little to judge by before."""
    monkeypatch.setattr(own_words, "HOPELESS", judged)
    model = tiny_checkpoint(tmp_path / "model", likely=0)
    engine = load_engine(EngineConfig(model=str(model), dtype="float32", device="cpu", threads=1))
    for template, speechless in ((engine.tokenizer.chat_template, False), ("{{ raise_exception('no') }}", True)):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        seen: list[GatherProgress] = []
        store = open_store(tmp_path / f"data {speechless}", HEADER)
        gathered = gather_own_words(
            EngineSource(engine, 4), tokenizer, SHORT, store, Goal(own_tokens=1500), progress=seen.append
        )
        assert gathered.speechless == speechless
        assert any(now.speechless for now in seen) == (speechless and judged == 10)
        while engine.has_work:
            engine.step()


def test_the_user_is_told_once_that_a_template_does_not_suit(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", **BRIEF)
    template = "{% if 'Turn' not in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}"
    path = model / "chat_template.jinja"
    path.write_text(template + path.read_text())
    status, output = run_command(model, "--out", tmp_path / "out", "--steps", 1, *SMALL)
    assert status == 0, output
    assert output.count("nearly all of the model's conversations with itself come to nothing") == 1
