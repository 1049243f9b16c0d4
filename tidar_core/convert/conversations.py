"""A model's own words as data: planned jobs, each led from its first prompt to a finished document.

A job is fixed by its number and the seed: its kind, its first words, its temperature. So a run that was interrupted
goes on with the jobs that are not done, and nothing else needs to be kept.

    chat    the model asks itself a question behind its template's open user turn, then answers, perhaps again
    code    a code opening and a few sampled tokens, continued without a template; text: the same with prose
    prompt  a question of the user's (--prompts), answered; file: the user's text (--text), as it stands
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerFast

from tidar_core.convert.seeds import CODE_OPENINGS, QUESTION_CODE_OPENINGS, QUESTION_OPENINGS, TEXT_OPENINGS
from tidar_core.convert.shards import Document, Kind, content_key
from tidar_core.convert.sources import Completion
from tidar_core.convert.template import Turn, answer_prompt, decode, encode, has_special, open_user_turn, text_start
from tidar_core.request import SamplingParams

ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.8, 1.0)  # drawn from: most answers that are served are greedy or cool
TOP_P, TOP_K = 0.95, 256  # what a small model keeps beyond is noise, and a whole sort of the vocabulary is slow
STEM_TOKENS = (4, 24)  # sampled behind an opening, so that no two texts begin alike
LEAST_OWN_TOKENS = 8
LONGEST_LOOP, LOOP_REPEATS = 48, 4


@dataclass(frozen=True, slots=True)
class DocumentPlan:
    """What the documents are to be. chat: the model has a chat template. question_tokens, answer_tokens: at most so
    many each; longest: positions a document may have."""

    seed: int
    chat: bool
    question_tokens: int = 128
    answer_tokens: int = 320
    longest: int = 1024

    def within(self, positions: int) -> "DocumentPlan":
        """The same for a model of so many positions: half of a document is for an answer, a quarter for a question."""
        longest = min(max(self.longest, 2 * self.answer_tokens), positions)
        return replace(
            self,
            longest=longest,
            question_tokens=min(self.question_tokens, longest // 4),
            answer_tokens=min(self.answer_tokens, longest // 2),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """number: -1 for the user's own prompts. opening: the first words given. seed: of its sampling. thinks: whether a
    model that can think before it answers does so here; if so, the document often ends before the answer begins."""

    number: int
    kind: Kind
    opening: str
    temperature: float
    turns: int
    seed: int
    thinks: bool = True


def plan_job(plan: DocumentPlan, number: int) -> Job:
    """The job of this number: always the same one."""
    draw = random.Random(f"{plan.seed}/{number}")
    kind: Kind = draw.choices(("chat", "code", "text"), (0.8, 0.1, 0.1))[0]
    if not plan.chat and kind == "chat":
        kind = "text"
    if kind == "code":
        opening = draw.choice(CODE_OPENINGS)
    elif kind == "text":
        opening = draw.choice(("", *TEXT_OPENINGS))
    else:
        openings = draw.choices(((), QUESTION_OPENINGS, QUESTION_CODE_OPENINGS), (0.3, 0.5, 0.2))[0]
        opening = draw.choice(openings) if openings else ""
    turns = draw.choices((1, 2, 3), (0.75, 0.17, 0.08))[0] if kind == "chat" else 1
    temperature = draw.choice(ANSWER_TEMPERATURES)
    return Job(number, kind, opening, temperature, turns, draw.getrandbits(48), thinks=number % 2 == 0)


def prompt_job(plan: DocumentPlan, prompt: str) -> Job:
    """The job of answering a question of the user's."""
    seed = random.Random(f"{plan.seed}/{prompt}").getrandbits(48)
    return Job(-1, "prompt", prompt, 0.0, 1, seed, thinks=seed % 2 == 0)


@dataclass(frozen=True, slots=True)
class Wish:
    """A completion that a conversation needs next."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class Conversation:
    """One job on its way. `start` gives its first wish and `advance` each next one, or None when the conversation is
    over; then `document` is what came of it.

    seen: keys of all documents so far, which no other may have. turns: as the template takes them. tokens, own: the
    document so far, and which of its tokens are the model's own. key: of what the document answers. asking: the wish on
    its way is for a question or a stem. heard: what all wishes have brought; with the job it determines the rest.
    """

    job: Job
    plan: DocumentPlan
    tokenizer: PreTrainedTokenizerFast
    seen: set[int]
    turns: list[Turn] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    own: list[bool] = field(default_factory=list)
    key: int = 0
    asking: bool = False
    heard: list[Completion] = field(default_factory=list)

    def start(self) -> Wish | None:
        """The first wish; None where the job cannot be done or was done before."""
        if self.job.kind in ("code", "text"):
            self._give(text_start(self.tokenizer, self.job.opening))
            return self._wish_stem()
        if self.job.kind == "prompt":
            return self._ask(self.job.opening)
        return self._wish_question(self.job.opening)

    def advance(self, completion: Completion) -> Wish | None:
        """Takes what the last wish brought; gives the next one, None at the end."""
        self.heard.append(completion)
        if self.asking:
            self.asking = False
            return self._take_question(completion) if self.job.kind == "chat" else self._take_stem(completion)
        kept = completion.tokens[: loop_start(completion.tokens)]
        self.tokens += kept
        self.own += [True] * len(kept)
        ended = completion.ended and len(kept) == len(completion.tokens)
        if self.job.kind != "chat" or not ended or len(self.turns) >= 2 * self.job.turns - 1:
            return None
        answer = decode(self.tokenizer, completion.tokens, skip_special=True)
        self.turns.append({"role": "assistant", "content": answer})
        return self._wish_question("")

    def cut(self, so_far: tuple[int, ...]) -> bool:
        """Ends the conversation in the midst of a wish that has brought `so_far`. False where that is too little for a
        document: then nothing has changed."""
        kept = () if self.asking else so_far[: loop_start(so_far)]
        if sum(self.own) + len(kept) < LEAST_OWN_TOKENS:
            return False
        self.tokens += kept
        self.own += [True] * len(kept)
        return True

    def document(self) -> Document | None:
        """What came of it; None where there is too little to learn from."""
        if sum(self.own) < LEAST_OWN_TOKENS:
            return None
        return Document(self.tokens, tuple(self.own), self.key, self.job.kind, self.job.number)

    def _wish_stem(self) -> Wish | None:
        """Lets the model go on with the opening for a few tokens, so that no two texts begin alike."""
        self.asking = True
        count = random.Random(self.job.seed).randint(*STEM_TOKENS)
        return self._fitting(self.tokens, SamplingParams(count, top_p=TOP_P, top_k=TOP_K, seed=self.job.seed))

    def _take_stem(self, completion: Completion) -> Wish | None:
        if completion.ended:
            return None
        self._give(self.tokens + completion.tokens)
        return self._wish_answer() if self._is_new(self.tokens) else None

    def _wish_question(self, opening: str) -> Wish | None:
        """Lets the model go on with a user's turn that begins with `opening`."""
        turn = open_user_turn(self.tokenizer, self.turns, opening, self.job.thinks)
        if turn is None or not self._extends(turn.tokens):
            return None
        self.asking = True
        params = SamplingParams(
            max_tokens=self.plan.question_tokens, top_p=TOP_P, top_k=TOP_K, seed=self.job.seed,
            stop=turn.stop, stop_token_ids=turn.stop_ids,
        )  # fmt: skip
        return self._fitting(turn.tokens, params)

    def _take_question(self, completion: Completion) -> Wish | None:
        """A question counts where it ended by itself, says something and was not asked before."""
        words = completion.tokens if completion.stop is not None else completion.tokens[:-1]
        if not completion.ended or has_special(self.tokenizer, words):
            return None
        text = decode(self.tokenizer, words)
        if completion.stop is not None:
            text = text[: text.find(completion.stop)]
        opening = self.job.opening if not self.turns else ""
        return self._ask((opening + text).strip())

    def _ask(self, question: str) -> Wish | None:
        """Puts the question to the model; None where it is too short, was asked before, or cannot be rendered."""
        words = encode(self.tokenizer, question)
        if len(words) < 3 and self.job.kind == "chat":
            return None
        if not self.turns and not self._is_new(words):
            return None
        self.turns.append({"role": "user", "content": question})
        if self.plan.chat:
            prompt = answer_prompt(self.tokenizer, self.turns, self.job.thinks)
        else:
            prompt = text_start(self.tokenizer, question)
        if prompt is None or not self._extends(prompt):
            return None
        self._give(prompt)
        return self._wish_answer()

    def _wish_answer(self) -> Wish | None:
        params = SamplingParams(self.plan.answer_tokens, temperature=0.0)
        if self.job.temperature:
            params = replace(params, temperature=self.job.temperature, top_p=TOP_P, top_k=TOP_K, seed=self.job.seed + 1)
        return self._fitting(self.tokens, params)

    def _is_new(self, tokens: tuple[int, ...]) -> bool:
        """Takes these tokens, which the document answers or continues, for its key; False where one has it already."""
        self.key = content_key(tokens)
        new = self.key not in self.seen
        self.seen.add(self.key)
        return new

    def _fitting(self, prompt: tuple[int, ...], params: SamplingParams) -> Wish | None:
        return Wish(prompt, params) if len(prompt) + params.max_tokens <= self.plan.longest else None

    def _extends(self, tokens: tuple[int, ...]) -> bool:
        """Whether `tokens`, a newly rendered conversation, begin with those that there are: a template may render
        earlier turns in another way."""
        return tokens[: len(self.tokens)] == self.tokens

    def _give(self, tokens: tuple[int, ...]) -> None:
        self.own += [False] * (len(tokens) - len(self.tokens))
        self.tokens = tokens


def loop_start(tokens: Sequence[int]) -> int:
    """How many tokens to keep of a text that may end in a loop: all, or those up to the loop's second round.

    A loop is a run of up to 48 tokens that is repeated to the end, at least four times in all; a single token at least
    eight times, since a short row of dashes is none.
    """
    length = len(tokens)
    for period in range(1, min(LONGEST_LOOP, length // LOOP_REPEATS) + 1):
        same = 0
        while same < length - period and tokens[length - 1 - same] == tokens[length - 1 - same - period]:
            same += 1
        if same + period >= period * LOOP_REPEATS * (2 if period == 1 else 1):
            return length - same + period
    return length
