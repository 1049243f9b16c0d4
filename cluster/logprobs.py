"""Log-probabilities on the wire, in the forms of OpenAI's two endpoints."""

from collections.abc import Callable, Sequence

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs

from tidar_core.request import TokenLogprobs

Spell = Callable[[int], str]


def chat_logprobs(entries: Sequence[TokenLogprobs], spell: Spell, bytes_of: Callable[[int], bytes]) -> ChoiceLogprobs:
    """`logprobs` of a chat choice: each token with its likeliest rivals. The `bytes` of all tokens joined are the
    answer's, where a token is but a part of a character too."""
    content = [
        ChatCompletionTokenLogprob(
            token=spell(entry.token),
            bytes=list(bytes_of(entry.token)),
            logprob=entry.logprob,
            top_logprobs=[
                TopLogprob(token=spell(token), bytes=list(bytes_of(token)), logprob=logprob)
                for token, logprob in entry.top
            ],
        )
        for entry in entries
    ]
    return ChoiceLogprobs(content=content, refusal=None)


def completion_logprobs(entries: Sequence[TokenLogprobs], spell: Spell, offset: int) -> Logprobs:
    """`logprobs` of a completion choice. `offset`: characters of the answer before the first of these tokens."""
    texts = [spell(entry.token) for entry in entries]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return Logprobs(
        tokens=texts,
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[{spell(token): logprob for token, logprob in entry.top} for entry in entries],
        text_offset=offsets,
    )
