"""The engine: requests join, `step()` moves all of them on, answers leave."""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tidar_core.engine.arrival import check_request, sequence_of
from tidar_core.engine.batch import Batch, draft_rows, step_size
from tidar_core.engine.constraint import constrained, guess_within
from tidar_core.engine.draft_policy import DraftPolicy
from tidar_core.engine.drafting import pick_drafts, with_draft_scores
from tidar_core.engine.flight import Flight, is_free, launch, may_fly, settled
from tidar_core.engine.grammars import GrammarQueue, Grammars
from tidar_core.engine.runner import Runner, ranked_logprobs, token_logprobs
from tidar_core.engine.scheduler import Scheduler, SequencePlan
from tidar_core.engine.step_cost import StepCost, StepSize
from tidar_core.engine.warmup import picking_seconds
from tidar_core.kernels.ops import GuessedSlots
from tidar_core.layout import BlockForm
from tidar_core.request import Finish, FinishReason, Request, RequestError, Sampling, Sequence, StepOutput
from tidar_core.sampling.penalties import NO_HISTORY, keep_allowed
from tidar_core.sampling.token_rule import TokenRule
from tidar_core.transfer import on_device

READ_AT_ONCE = 64  # rows of the vocabulary's width, for prompt log-probabilities


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, for those who ask.

    exact: a token's bits do not depend on the batch, as proven at warm-up. block_length: 0 where there is no drafter.
    expected_acceptance: how often the drafts hold by the drafter's own account (`AdapterConfig.holds`).
    max_model_len: positions that a request may use. sampling_defaults: for whoever makes requests; the engine does as
    their parameters say. pages: of K/V, page_size positions each. fingerprint: names the base weights. identity: all of
    the model that decides a token (`tidar_core.model.fingerprint`). arithmetic: names the kernels, the torch and the
    kind of processor that compute with them. mask_token: the token that is never emitted, where one stands for a mask.
    cost: what a step's rows were measured to cost at warm-up. full_rows: of all sequences that draft fully, in one
    step.
    """

    model: str
    adapter: str | None
    dtype: str
    kv_dtype: str
    device: str
    exact: bool
    block_length: int
    form: BlockForm
    expected_acceptance: tuple[float, ...]
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    sampling_defaults: Sampling
    pages: int
    page_size: int
    max_running: int
    fingerprint: str
    identity: str
    arithmetic: str
    mask_token: int | None
    cost: StepCost
    full_rows: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Requests and pages at this moment. waiting_since: when the first of those that never ran yet arrived, on the
    monotonic clock; an answer that gave its place back has not waited since then. passed: rows of the forward pass that
    the last step brought to its end. preemptions: how often, since the start, an answer gave its place back. begun:
    requests that ran for the first time in the last step, and since when, on that clock."""

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    waiting_since: float | None = None
    passed: int = 0
    preemptions: int = 0
    begun: tuple[tuple[str, float], ...] = ()


class Engine:
    """One model on one device. Not thread-safe: one thread submits, aborts and steps."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: PreTrainedTokenizerFast,
        grammars: Grammars,
        runner: Runner,
        scheduler: Scheduler,
        overlap_steps: bool,
    ):
        self.info = info
        self.tokenizer = tokenizer
        self._runner = runner
        self._scheduler = scheduler
        self._overlap_steps = overlap_steps
        self._flight: Flight | None = None
        self._landed = 0.0
        self._ended: list[StepOutput] = []
        self._passed = 0
        self._compiling = GrammarQueue(grammars, info.eos_ids, info.vocab_size)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._ended or self._scheduler.running or self._scheduler.waiting or self._compiling)

    @property
    def captured(self) -> int:
        """How many sizes of steps were captured as CUDA graphs, or tried."""
        return 0 if self._runner.graphs is None else len(self._runner.graphs)

    def stats(self) -> EngineStats:
        """Requests and pages at this moment."""
        scheduler = self._scheduler
        waiting = len(scheduler.waiting) + len(self._compiling)
        since = min((sequence.arrived for sequence in scheduler.waiting if sequence.cached is None), default=None)
        pool = scheduler.pool
        running, preemptions, begun = len(scheduler.running), scheduler.preemptions, tuple(scheduler.begun)
        return EngineStats(running, waiting, pool.owned, pool.total, since, self._passed, preemptions, begun)

    def use_policy(self, policy: DraftPolicy) -> DraftPolicy:
        """Lets another policy choose from now on and learn what steps take; returns the one before it."""
        before, self._scheduler.policy = self._scheduler.policy, policy
        return before

    def picking_seconds(self, proposals: int, slots: int) -> float:
        """Seconds that picking the drafts of `proposals` proposals takes, `slots` each, once they are scored."""
        return picking_seconds(self._runner, proposals, slots)

    def prefix_marks(self, limit: int) -> bytes:
        """Which prefixes of prompts are cached here: `PagePool.marks`."""
        return self._scheduler.pool.marks(limit)

    def submit(self, request: Request) -> None:
        """Queues a request. Raises RequestError where it can never be served."""
        if self._scheduler.has(request.request_id) or request.request_id in self._compiling:
            raise RequestError(f"a request named {request.request_id} is under way already", "request_id")
        check_request(request, self.info, self.tokenizer)
        sequence = sequence_of(request, self.tokenizer, self.info.vocab_size)
        if request.params.grammar is None:
            self._scheduler.add(sequence)
        else:
            self._compiling.add(sequence, request.params.grammar)

    def abort(self, request_id: str) -> None:
        """Ends a request, at any moment; one that is not here is ignored."""
        if self._scheduler.remove(request_id) or self._compiling.remove(request_id):
            self._ended.append(StepOutput(request_id, (), finish=Finish(FinishReason.ABORT)))

    def step(self) -> list[StepOutput]:
        """Returns the outputs of one finished step, at most one a request. With overlapping steps the next one may
        already have been launched."""
        ended, self._ended, self._passed, self._scheduler.begun = self._ended, [], 0, []
        ended += self._compiling.admit(self._scheduler.add)
        flight, self._flight = self._flight, None
        if flight is not None and any(plan.sequence in self._scheduler.running for plan in flight.plans):
            return ended + self._land(flight)
        plans = self._scheduler.plan()
        if not plans:
            if not ended:
                self._compiling.pause()
            return ended
        if self._overlap_steps and all(plan.emits and may_fly(plan.sequence, self.info.block_length) for plan in plans):
            return ended + self._land(self._launch(plans))
        return ended + self._step_alone(plans)

    def _step_alone(self, plans: Items[SequencePlan]) -> list[StepOutput]:
        """A step from its plans to its answers, with the host deciding on the way."""
        began = time.monotonic()
        batch = self._runner.batch(plans)
        size, untypical = step_size(plans, batch), self._runner.untypical
        hidden = self._runner.forward(batch)
        self._read_prompts(plans, hidden)
        scores = self._score(size, batch, hidden)
        outputs = self._verify(plans, batch, scores)
        self._draft(plans, batch, hidden, scores, outputs)
        self._took(size, untypical, began)
        return outputs

    def _took(self, size: StepSize, untypical: int, began: float) -> None:
        self._passed = round(size.unscored + size.verify + size.mask)
        if self._runner.untypical == untypical:  # else it taught what such steps will not cost
            self._scheduler.policy.took(size, time.monotonic() - began)

    def _launch(self, plans: Items[SequencePlan], behind: tuple[Flight, Items[int]] | None = None) -> Flight:
        cost = self._scheduler.policy.cost
        return launch(self._runner, plans, cost, behind)

    def _land(self, flight: Flight) -> list[StepOutput]:
        """The answers of a step in flight; before they are waited for the next one is launched, where it can be."""
        scheduler = self._scheduler
        free = all(is_free(plan.sequence, self.info.block_length) for plan in flight.plans)
        planned = scheduler.plan_ahead(flight.plans) if free else None
        following = None if planned is None else self._launch(planned[0], (flight, planned[1]))
        found = zip(flight.plans, *flight.land(), strict=True)
        here = [entry for entry in found if entry[0].sequence in scheduler.running]
        outputs = scheduler.commit([plan for plan, _, _ in here], [truths for _, truths, _ in here])
        for plan, _, drafts in here:
            if plan.sequence in scheduler.running:
                scheduler.take_drafts(plan.sequence, drafts)
        if following is not None and scheduler.running:
            plans = [settled(plan) if plan.sequence in scheduler.running else plan for plan in following.plans]
            self._flight = replace(following, plans=tuple(plans))
        self._took(flight.size, flight.untypical, max(flight.launched, self._landed))
        self._landed = time.monotonic()
        return outputs

    def _read_prompts(self, plans: Items[SequencePlan], hidden: Tensor) -> None:
        """Notes the log-probabilities of prompt tokens, for the requests that ask for them."""
        row = 0
        for plan in plans:
            sequence, wanted = plan.sequence, plan.sequence.request.params.prompt_logprobs
            if wanted is not None and sequence.reads_prompt:
                first = max(plan.start, len(sequence.prompt_logprobs))  # read before it was preempted
                last = min(plan.start + len(plan.known), sequence.prompt_length - 1)
                for start in range(first, last, READ_AT_ONCE):
                    end = min(start + READ_AT_ONCE, last)
                    logits = self._runner.scores(hidden, range(row + start - plan.start, row + end - plan.start))
                    sequence.prompt_logprobs += ranked_logprobs(logits, sequence.tokens[start + 1 : end + 1], wanted)
            row += plan.verify_rows

    def _score(self, size: StepSize, batch: Batch, hidden: Tensor) -> "Scores":
        """The scores of the verify rows; those of all slots with them where one pass over the head costs less."""
        rows: list[int] = batch.layout.answer_rows.tolist()
        if self._scheduler.policy.cost.at_once(size):
            rows += (batch.size.verify + batch.layout.guess_rows).tolist()
        return Scores(self._runner, hidden, rows)

    def _verify(self, plans: Items[SequencePlan], batch: Batch, scores: "Scores") -> list[StepOutput]:
        """Picks the true tokens and commits them."""
        rows = batch.layout.answer_rows.tolist()
        if not rows:
            return self._scheduler.commit(plans, [[] for _ in plans])
        rules = [rule for plan in plans if plan.emits for rule in self._verify_rules(plan)]
        logits = scores.of(rows)
        truths = self._runner.ops.pick(with_draft_scores(plans, logits), rules).tolist()
        outputs = self._scheduler.commit(plans, _split(truths, batch.layout.emit_rows), retry_without_drafts=True)
        if all(rule.params.logprobs is None for rule in rules):
            return outputs
        emitting = [rows for rows in batch.layout.emit_rows if rows]
        logprobs = _split(token_logprobs(logits, truths, rules), emitting)
        return [
            output._replace(logprobs=tuple(entry for entry in entries[: len(output.tokens)] if entry is not None))
            for output, entries in zip(outputs, logprobs, strict=True)
        ]

    def _draft(
        self, plans: Items[SequencePlan], batch: Batch, hidden: Tensor, scores: "Scores", outputs: Items[StepOutput]
    ) -> None:
        """Picks the drafts of the proposals that came true; the others are never looked at."""
        by_request = {output.request_id: output for output in outputs}
        chosen: list[tuple[SequencePlan, range, int]] = []
        for plan, first in zip(plans, batch.first_mask_rows, strict=True):
            output = by_request.get(plan.sequence.request.request_id)
            if output is None or output.finish is not None or output.trace is None or output.trace.used is None:
                continue
            used = output.trace.used
            chosen.append((plan, draft_rows(plan.shape, first, plan.shape.proposals.index(used)), used))
        if not chosen:
            return
        rules = [
            rule
            for plan, rows, used in chosen
            for rule in self._rules(plan.sequence, plan.position + used + 1, len(rows))
        ]
        rows_chosen = [row for _, rows, _ in chosen for row in rows]
        logits = scores.of(rows_chosen)
        anchors = on_device([plan.sequence.tokens[-1] for plan, _, _ in chosen], hidden.device)
        counts = [len(rows) for _, rows, _ in chosen]
        draft_scores = [
            own.clone() if plan.sequence.request.params.draft_trust < 1.0 else None
            for (plan, _, _), own in zip(chosen, logits.split(counts), strict=True)
        ]
        keep_allowed(logits, [plan.sequence.request.params for plan, _, _ in chosen], counts)
        alone = any(own is not None for own in draft_scores)
        slots = GuessedSlots(hidden[on_device(rows_chosen, hidden.device)], logits, rules, anchors, counts)
        picks = pick_drafts(self._runner, slots, alone=alone)
        drafts = _split(picks.tolist(), [rows for _, rows, _ in chosen])
        followed = [(plan.sequence.constraint, tokens) for (plan, _, _), tokens in zip(chosen, drafts, strict=True)]
        if any(constraint is not None for constraint, _ in followed):
            drafts = guess_within(followed, logits, rules)
        for (plan, _, _), tokens, own in zip(chosen, drafts, draft_scores, strict=True):
            self._scheduler.take_drafts(plan.sequence, tokens, own)

    def _verify_rules(self, plan: SequencePlan) -> list[TokenRule]:
        rules = self._rules(plan.sequence, plan.position + 1, len(plan.drafts) + 1, plan.drafts)
        if plan.sequence.constraint is None:
            return rules
        masks = plan.sequence.constraint.masks(plan.drafts)
        return [constrained(rule, mask) for rule, mask in zip(rules, masks, strict=True)]

    def _rules(self, sequence: Sequence, first: int, count: int, ahead: tuple[int, ...] = ()) -> list[TokenRule]:
        """The rules for `count` undecided tokens in a row, from the position `first` on; the i-th follows the first i
        of those `ahead`, as far as they are known."""
        params = sequence.request.params
        still_banned = min(count, max(0, params.min_tokens - sequence.generated))
        bad_words = sequence.bad_words
        if params.temperature == 0 and not still_banned and not params.penalises and bad_words is None:
            return [TokenRule(params, first)] * count  # the best is the best wherever it stands
        ends = tuple(sorted(sequence.ends)) if still_banned else ()
        ledger = sequence.ledger
        if ledger is not None:
            ledger.follow(sequence.tokens)
        rules = []
        for place in range(count):
            history = NO_HISTORY if ledger is None else ledger.history(ahead[:place])
            banned = ends if place < still_banned else ()
            if bad_words is not None:
                known = place <= len(ahead)
                banned += bad_words.refused(sequence.tokens, ahead[:place]) if known else bad_words.always
            rules.append(TokenRule(params, first + place, banned, history))
        return rules


class Scores:
    """The logits of a step's rows: those of the rows `first` are computed in one pass, others when they are asked
    for."""

    def __init__(self, runner: Runner, hidden: Tensor, first: Items[int]):
        self._runner = runner
        self._hidden = hidden
        self._at = {row: index for index, row in enumerate(first)}
        self._logits = runner.scores(hidden, first) if first else hidden[:0]

    def of(self, rows: Items[int]) -> Tensor:
        """[rows, vocab]."""
        found = [self._at.get(row, -1) for row in rows]
        if min(found) < 0:
            return self._runner.scores(self._hidden, rows)
        if found == list(range(found[0], found[0] + len(found))):
            return self._logits[found[0] : found[0] + len(found)]
        return self._logits[on_device(found, self._logits.device)]


T = TypeVar("T")


def _split(items: Items[T], spans: Items[range]) -> list[list[T]]:
    """`items` cut into pieces as long as the spans."""
    rest = iter(items)
    return [[next(rest) for _ in span] for span in spans]
