"""From a request's fields to `SamplingParams`: what it leaves out, is out of range, or does not fit the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from tokenizers import Tokenizer

from cluster.card import ModelCard
from cluster.errors import bad_request, from_request_error, too_long
from cluster.wire.schemas import Body, ChatBody, CompletionBody
from tidar_core.grammar.grammar import Grammar
from tidar_core.request import RequestError, Sampling, SamplingParams, ThoughtLimit

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
# Each choice's request carries them all.
BAD_WORDS_TOKENS = 8192
BAD_WORD_TOKENS = 32
SPELT_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TokenWishes:
    """What a body says of tokens: what is added to the scores of some, which alone may come, which words never."""

    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_WISHES = TokenWishes()


def token_wishes(body: Body, card: ModelCard, backend: Tokenizer) -> TokenWishes:
    """Raises ApiError (400) where one could never come up."""
    bias = logit_bias(body.logit_bias or {}, card.vocab_size)
    allowed = tuple(sorted(known_ids("allowed_token_ids", body.allowed_token_ids, card.vocab_size)))
    return TokenWishes(bias, allowed, bad_words(body.bad_words or (), backend, card.vocab_size))


def bad_words(words: Sequence[str], backend: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each as the tokens that it has where a text begins with it, and behind a space; one of white space as it is.
    Raises ApiError (400) for one that is empty, or where they have too many tokens."""
    if not all(words):
        raise bad_request("bad_words: a word must not be empty", "bad_words")
    bare = [word.lstrip() or word for word in words]
    texts = [text for word in bare for text in ((word,) if word.isspace() else (word, f" {word}"))]
    found: dict[tuple[int, ...], None] = {}
    size = 0
    for start in range(0, len(texts), SPELT_AT_ONCE):  # nothing is spelt behind what is refused
        some = texts[start : start + SPELT_AT_ONCE]
        for text, encoding in zip(some, backend.encode_batch_fast(some, add_special_tokens=False), strict=True):
            ids = tuple(encoding.ids)
            if len(ids) > BAD_WORD_TOKENS:
                what = f"{text[:40]!r} has {len(ids)} tokens, and a word may have {BAD_WORD_TOKENS} at most"
                raise bad_request(f"bad_words: {what}: shorten it", "bad_words")
            if ids and ids not in found and max(ids) < vocab_size:
                found[ids] = None
                size += len(ids)
        if size > BAD_WORDS_TOKENS:
            what = f"all words together may have {BAD_WORDS_TOKENS} tokens at most, counted behind a space too"
            raise bad_request(f"bad_words: {what}: send fewer or shorter ones", "bad_words")
    return tuple(found)


def logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's map from token ids, as strings, to what is added to their scores. Raises ApiError (400)."""
    for token in bias:
        known = token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocab_size
        if not known or token != str(int(token)):
            raise bad_request(f"logit_bias: {token[:20]!r} is no token id of this model", "logit_bias")
    return tuple((int(token), value) for token, value in bias.items())


def sampling_of(body: Body, card: ModelCard) -> Sampling:
    """How a body's tokens are picked: what it leaves out is as with the model's defaults."""
    return card.sampling_defaults.but(**{field.name: getattr(body, field.name) for field in fields(Sampling)})


def known_ids(name: str, ids: Sequence[int] | None, vocab_size: int) -> frozenset[int]:
    """The token ids of a field. Raises ApiError (400) for one that could never come up."""
    for token in ids or ():
        if not 0 <= token < vocab_size:
            raise bad_request(f"{name}: {str(token)[:20]} is no token id of this model", name)
    return frozenset(ids or ())


def sampling_params(
    body: Body,
    card: ModelCard,
    prompt_tokens: int,
    seed: int,
    grammar: Grammar | None = None,
    wishes: TokenWishes = NO_WISHES,
    limit: ThoughtLimit | None = None,
) -> SamplingParams:
    """How to sample the answer to a prompt of that many tokens. seed: where the body has none. grammar: what the answer
    has to follow, if anything. wishes: the body's, made once for all of its prompts. limit: of its thoughts.

    Raises ApiError (400) where a value is out of range or prompt and answer do not fit the model.
    """
    chat = isinstance(body, ChatBody)
    name, wanted = "max_tokens", body.limit
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name = "max_completion_tokens"
    alone = isinstance(body, CompletionBody) and body.reads_alone
    if alone:
        wanted = 1  # which a step says anyway, and nobody is told
    if wanted is not None and wanted < 1:
        raise bad_request(f"{name} must be at least 1", name)
    room = card.max_model_len - prompt_tokens
    if room < 1 or (wanted is not None and wanted > room):
        at_fault = name if room >= 1 else "messages" if chat else "prompt"
        raise too_long(prompt_tokens, wanted, card.max_model_len, at_fault)
    default = room if chat else min(COMPLETION_MAX_TOKENS, room)
    sampling = sampling_of(body, card)
    trust = 1.0 if body.tidar.draft_trust is None else body.tidar.draft_trust
    drafts = body.tidar.drafts or (card.drafts if trust >= 1.0 else "full")
    try:
        return SamplingParams(
            max_tokens=default if wanted is None else wanted,
            temperature=sampling.temperature,
            top_k=0 if sampling.top_k == -1 else min(sampling.top_k, card.vocab_size),
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=seed if body.seed is None else body.seed,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=wishes.bias,
            allowed_token_ids=wishes.allowed,
            bad_words=wishes.bad_words,
            logprobs=body.wanted_logprobs,
            prompt_logprobs=body.wanted_of_prompt,
            min_tokens=0 if alone else body.min_tokens or 0,
            stop=tuple(body.stop or ()),
            stop_token_ids=known_ids("stop_token_ids", body.stop_token_ids, card.vocab_size),
            ignore_eos=bool(body.ignore_eos),
            grammar=None if alone else grammar,
            thought_limit=limit,
            # What an answer is held to is held against the text with all of its spaces; calls of tools begin with none.
            mid_text=not isinstance(body, ChatBody) or body.begun_answer is not None or body.grammar is not None,
            special_text=body.skip_special_tokens is False,
            drafts=drafts,
            draft_trust=trust,
            block=None if body.tidar.block is None else min(body.tidar.block, max(1, card.block_length)),
        )
    except RequestError as error:
        if chat and error.param == "logprobs":  # the number has a name of its own there
            raise bad_request(str(error).replace("logprobs", "top_logprobs", 1), "top_logprobs") from error
        raise from_request_error(error) from error
