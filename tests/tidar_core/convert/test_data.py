"""Own words as data: the template's open turn, jobs and conversations, the user's own text and prompts."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.tidar_core.convert.documents import HEADER
from tests.tiny import thinking_tokenizer, tiny_tokenizer
from tidar_core.config import ConfigError
from tidar_core.convert.conversations import Conversation, DocumentPlan, loop_start, plan_job, prompt_job
from tidar_core.convert.given import read_prompts
from tidar_core.convert.own_words import AddedText, add_text
from tidar_core.convert.shards import content_key, open_store
from tidar_core.convert.sources import Completion
from tidar_core.convert.template import (
    answer_prompt,
    can_chat,
    encode,
    has_special,
    open_user_turn,
    text_lead,
    text_start,
)

SHORT = DocumentPlan(seed=0, chat=True, question_tokens=24, answer_tokens=32, longest=512)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


# The template


def test_the_open_turn_is_the_template_up_to_the_users_words(tokenizer):
    turn = open_user_turn(tokenizer, [], "Why")
    assert tokenizer.decode(list(turn.tokens)) == "<|im_start|>user\nWhy"
    assert turn.stop_ids == {2}
    assert turn.stop == ()


def test_the_open_turn_continues_a_conversation(tokenizer):
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]
    text = tokenizer.decode(list(open_user_turn(tokenizer, turns).tokens))
    assert text.endswith("Two.<|im_end|>\n<|im_start|>user\n")


def test_a_template_without_end_tokens_ends_a_turn_with_its_own_words():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n###\n' }}{% endfor %}"
    turn = open_user_turn(tokenizer, [])
    assert tokenizer.decode(list(turn.tokens)) == "user: "
    assert turn.stop == ("###",)


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ 'nothing of the user' }}"])
def test_where_there_is_no_usable_template_there_is_no_open_turn(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert open_user_turn(tokenizer, []) is None


@pytest.mark.parametrize("refuses", ["add_generation_prompt", "'word' in messages[0]['content']"])
def test_a_template_may_refuse_to_ask_for_an_answer(refuses):
    """All of them, or one of them: whoever asks for that has a conversation less."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        f"{{% if {refuses} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{tokenizer.chat_template}"
    )
    assert can_chat(tokenizer) == ("word" in refuses) == (open_user_turn(tokenizer, []) is not None)
    conversation = Conversation(prompt_job(SHORT, "What is a word?"), SHORT, tokenizer, set())
    assert conversation.start() is None
    assert conversation.document() is None


def test_a_text_begins_with_at_least_one_token(tokenizer):
    assert len(text_start(tokenizer, "")) == 1
    assert text_start(tokenizer, "def ") == encode(tokenizer, "def ")


@pytest.mark.parametrize("begins", [False, True])
def test_a_tokenizer_without_the_letter_that_texts_are_tried_with(begins):
    bare = Tokenizer(models.BPE({"<s>": 0, "日": 1, "本": 2}, []))
    if begins:
        bare.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>" if begins else None)
    assert encode(tokenizer, "A日本") == (1, 2)
    assert text_lead(tokenizer) == ((0,) if begins else ())
    assert text_start(tokenizer, "A") == (0,)


def test_a_text_begins_before_the_end_that_a_tokenizer_puts_behind_it(tokenizer):
    ending = tiny_tokenizer()
    ending.backend_tokenizer.post_processor = TemplateProcessing("$A <|im_end|>", None, [("<|im_end|>", 2)])
    assert ending("A")["input_ids"][-1] == 2
    assert text_start(ending, "def ") == encode(tokenizer, "def ")


def test_special_tokens_are_known_without_a_list_of_them(tokenizer, monkeypatch):
    """Of a large vocabulary it takes long to make, and a conversation asks at each turn."""

    def listed(_) -> None:
        raise AssertionError

    monkeypatch.setattr(type(tokenizer), "added_tokens_decoder", property(listed))
    assert [has_special(tokenizer, tokens) for tokens in ((), (5, 9), (5, 2), (1, 5))] == [False, False, True, True]
    assert open_user_turn(tokenizer, []).stop_ids == {2}


# Jobs and conversations


def test_a_job_is_fixed_by_number_and_seed():
    jobs = [plan_job(SHORT, number) for number in range(300)]
    assert jobs == [plan_job(SHORT, number) for number in range(300)]
    assert jobs[:20] != [plan_job(DocumentPlan(1, chat=True), number) for number in range(20)]
    assert len({job.seed for job in jobs}) == 300
    kinds = Counter(job.kind for job in jobs)
    assert kinds["chat"] > 200
    assert kinds["code"] > 10
    assert kinds["text"] > 10
    assert len({job.opening for job in jobs}) > 100


def test_longer_answers_have_longer_documents_as_far_as_there_are_positions():
    plan = DocumentPlan(0, chat=True, answer_tokens=900)
    assert (plan.within(4096).longest, plan.within(4096).answer_tokens) == (1800, 900)
    assert (plan.within(1000).longest, plan.within(1000).answer_tokens) == (1000, 500)
    assert DocumentPlan(0, chat=True).within(4096) == DocumentPlan(0, chat=True)


def test_a_model_without_a_template_gets_no_chat_jobs():
    jobs = [plan_job(DocumentPlan(0, chat=False), number) for number in range(100)]
    assert {job.kind for job in jobs} == {"code", "text"}


def lead(conversation: Conversation, answers: list[Completion]) -> list[tuple[int, ...]]:
    """Plays the model; gives the prompts that the conversation asked to be completed."""
    wish, prompts = conversation.start(), []
    for answer in answers:
        assert wish is not None
        prompts.append(wish.prompt)
        wish = conversation.advance(answer)
    assert wish is None
    return prompts


def chat_job(turns: int, opening: str = "What is"):
    job = next(j for j in (plan_job(SHORT, n) for n in itertools.count()) if j.kind == "chat")
    return type(job)(job.number, "chat", opening, 0.0, turns, job.seed)


def test_a_conversation_asks_itself_and_answers(tokenizer):
    question, answer = encode(tokenizer, " the answer?"), encode(tokenizer, "The answer is what the question was.")
    conversation = Conversation(chat_job(2), SHORT, tokenizer, set())
    prompts = lead(
        conversation,
        [
            Completion(0, (*question, 2), True),
            Completion(0, (*answer, 2), True),
            Completion(0, (*encode(tokenizer, "Why do the dogs mind?"), 2), True),
            Completion(0, answer * 2, False),
        ],
    )
    turns = [{"role": "user", "content": "What is the answer?"}]
    assert prompts[1] == answer_prompt(tokenizer, turns)
    made = conversation.document()
    words = [token for token, own in zip(made.tokens, made.own, strict=True) if own]
    assert words == [*answer, 2, *answer * 2]
    assert made.tokens[: len(prompts[3])] == prompts[3]
    assert not any(made.own[: len(prompts[1])])
    assert made.key == content_key(encode(tokenizer, "What is the answer?"))


def test_a_model_that_thinks_answers_every_second_question_without(tokenizer):
    jobs = [plan_job(SHORT, number) for number in range(40)] + [prompt_job(SHORT, f"Why {n}?") for n in range(40)]
    thinking, closed = thinking_tokenizer(), "<think>\n\n</think>\n\n"
    assert [job.thinks for job in jobs[:40]] == [True, False] * 20
    for job in (each for each in jobs if each.kind in ("chat", "prompt")):
        prompts = []
        for each in (thinking, tokenizer):
            conversation = Conversation(job, SHORT, each, set())
            wish = conversation.start()
            if job.kind == "chat":
                wish = conversation.advance(Completion(0, (*encode(each, " is the answer?"), 2), True))
            prompts.append(each.decode(list(wish.prompt)))
        assert prompts[0].endswith(closed) != job.thinks
        assert not prompts[1].endswith(closed)  # a template that does not ask
    assert 10 < sum(job.thinks for job in jobs[40:]) < 30


def test_questions_that_are_no_use_end_the_conversation(tokenizer):
    seen: set[int] = set()
    good = (*encode(tokenizer, " the answer?"), 2)
    for question, ended in (((2,), True), ((5, 1, 5, 2), True), (good, False)):
        conversation = Conversation(chat_job(1, ""), SHORT, tokenizer, seen)
        lead(conversation, [Completion(0, question, ended)])
        assert conversation.document() is None
    first = Conversation(chat_job(1), SHORT, tokenizer, seen)
    lead(first, [Completion(0, good, True), Completion(0, tuple(range(50, 80)), False)])
    again = Conversation(chat_job(1), SHORT, tokenizer, seen)
    lead(again, [Completion(0, good, True)])
    assert first.document() is not None
    assert again.document() is None


def test_a_text_is_begun_by_a_few_sampled_tokens(tokenizer):
    job = next(j for j in (plan_job(SHORT, n) for n in itertools.count()) if j.kind == "code")
    seen: set[int] = set()
    for expected in (30, 0):  # the same stem a second time is no new text
        conversation = Conversation(job, SHORT, tokenizer, seen)
        wish = conversation.start()
        assert wish.prompt == text_start(tokenizer, job.opening)
        assert wish.params.temperature == 1.0
        following = conversation.advance(Completion(0, tuple(range(40, 40 + wish.params.max_tokens)), False))
        if expected:
            assert following.prompt == (*wish.prompt, *range(40, 40 + wish.params.max_tokens))
            assert conversation.advance(Completion(0, tuple(range(100, 130)), False)) is None
        made = conversation.document()
        assert (sum(made.own) if made else 0) == expected
    short = Conversation(job, SHORT, tokenizer, set())
    short.start()
    assert short.advance(Completion(0, (40, 2), True)) is None


def test_a_users_prompt_is_answered(tokenizer):
    conversation = Conversation(prompt_job(SHORT, "Why?"), SHORT, tokenizer, set())
    lead(conversation, [Completion(0, tuple(range(50, 70)), False)])
    made = conversation.document()
    assert made.kind == "prompt"
    assert "Why?" in tokenizer.decode(list(made.tokens))
    assert sum(made.own) == 20


@settings(deadline=None)
@given(head=st.lists(st.integers(0, 5), max_size=40), loop=st.lists(st.integers(10, 15), min_size=1, max_size=12))
def test_a_loop_is_cut_behind_its_second_round(head, loop):
    period = next(
        p for p in range(1, len(loop) + 1) if loop == (loop[:p] * len(loop))[: len(loop)] and len(loop) % p == 0
    )
    loop = loop[:period]
    tokens = [*head, *loop * 20]
    assert tokens[: loop_start(tokens)] == [*head, *loop * 2]


@given(st.lists(st.integers(0, 1000), unique=True, max_size=60))
def test_what_does_not_loop_is_kept(tokens):
    assert loop_start(tokens) == len(tokens)


# The user's own


def test_text_is_cut_into_documents_once(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 40 + "In the beginning there was a word.\n" * 30)
    store = open_store(tmp_path / "data", HEADER)
    added = add_text(tokenizer, path, store, 64, 512).documents
    assert added > 5
    assert add_text(tokenizer, path, store, 64, 512) == AddedText(0, 0)
    corpus = store.read().corpus
    whole = [t for i in range(len(corpus)) for t in corpus.document(i)[0].tolist()]
    assert len(corpus) == added
    assert all(
        corpus.document(i)[1].tolist() == [False] + [True] * (len(corpus.document(i)[0]) - 1) for i in range(added)
    )
    assert set(whole) <= set(encode(tokenizer, path.read_text()))


def test_a_text_begins_as_the_tokenizer_begins_one(tokenizer, tmp_path):
    path, begins = tmp_path / "text.txt", tiny_tokenizer()
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)]
    )
    plain, begun = (open_store(tmp_path / name, HEADER) for name in ("plain", "begun"))
    added = add_text(tokenizer, path, plain, 64, 512)
    assert add_text(begins, path, begun, 64, 512) == added
    for index in range(added.documents):
        (tokens, own), (words, _) = (store.read().corpus.document(index) for store in (begun, plain))
        assert tokens.tolist() == [0, *words]
        assert own.tolist() == [False] + [True] * len(words)
    assert add_text(begins, path, plain, 64, 512) == AddedText(0, 0), "stored as it was without"


def test_what_the_model_has_no_embedding_of_is_left_out(tmp_path):
    path, tokenizer = tmp_path / "text.txt", tiny_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<|extra|>"])
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 40 + "<|extra|>")
    store = open_store(tmp_path / "data", HEADER)
    assert add_text(tokenizer, path, store, 64, rows + 1).unknown == 0
    store = open_store(tmp_path / "less", HEADER)
    added = add_text(tokenizer, path, store, 64, rows)
    assert added.documents == len(store.read().corpus) > 1
    assert added.unknown == 1
    assert store.read().corpus.tokens.max() < rows
    with pytest.raises(ConfigError, match="nothing to learn from"):
        add_text(tokenizer, path, store, 64, 1)


def test_a_text_too_short_to_learn_from_is_told(tokenizer, tmp_path):
    store = open_store(tmp_path / "data", HEADER)
    for text in ("", "Too short."):
        (tmp_path / "text").write_text(text)
        with pytest.raises(ConfigError, match="nothing to learn from"):
            add_text(tokenizer, tmp_path / "text", store, 64, 512)


def test_prompts_are_read_plain_or_as_json(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('Why?\n\n{"prompt": "How so?", "more": 1}\n')
    assert read_prompts(path) == ["Why?", "How so?"]


@pytest.mark.parametrize("content", ['{"prompt": 3}', '{"question": "?"}', "{half", "\n\n"])
def test_bad_prompts_are_one_line(tmp_path, content):
    path = tmp_path / "prompts"
    path.write_text(content)
    with pytest.raises(ConfigError, match="prompt") as raised:
        read_prompts(path)
    assert "\n" not in str(raised.value)


def test_files_that_are_not_there_are_one_line(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        add_text(tokenizer, tmp_path / "none", open_store(tmp_path / "data", HEADER), 64, 512)
