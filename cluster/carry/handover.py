"""One request, carried over as many replicas as it takes.

A token depends on the tokens before it, the parameters and the seed alone, so a request goes on at another replica as
its prompt and the tokens that were sent already. What may befall the replica under a stream: it dies, it hangs (its
heartbeats stop), its engine breaks, it is shut down. The client sees a gap, never a lost or a repeated token.

Each attempt is a call of its own under a name of its own, and one of them is followed: a replica that wakes up late
talks to nobody, and finds its call cancelled. What happens to it meanwhile comes by `channels`.

A replica that hangs is told from one that is slow by time alone. So a stream whose replica has been quiet for a while
is begun at another one too, and the next token decides: if the first replica speaks again before the second one has
brought it, nothing has happened but the second one's work; else the first has lost the stream.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from opentelemetry.trace import Tracer

from cluster.carry.attempts import OTHER_MODEL, Attempt, Start, ended_badly
from cluster.carry.channels import Call, Channels, LookAgain, Lost
from cluster.errors import ApiError, model_changed, not_ready
from cluster.line import HEARTBEAT_SECONDS, EngineKind, Refusal, Route
from cluster.observe.ingress_metrics import StreamCounts
from cluster.observe.tracing import AttemptSpan
from tidar_core.request import FinishReason, Request, StepOutput

log = logging.getLogger("ray.serve")
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 0.5
LONGEST_WAIT_SECONDS = 30.0  # for a call to be accepted
QUIET_SHARE = 3  # of the silence that counts as death, one part is enough for a rival
MOST_DOUBLINGS = 32  # a stream may look for a replica more often than a number can be doubled
LATE_SECONDS = 0.2  # that a heartbeat may be without anybody's noticing


class Replicas(Protocol):
    """Those that may be called: `cluster.carry.directory` where there is a cluster."""

    @property
    def replicas(self) -> tuple[str, ...]: ...
    @property
    def silent(self) -> frozenset[str]: ...
    def silence(self, name: str) -> None: ...
    def marks(self, request: Request) -> bytes: ...
    def generate(self, request: Request, mailbox: str, kind: EngineKind | None, route: Route) -> Call: ...
    def listen(self, replica: str, mailbox: str) -> Call: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a stream waits before it moves or is given up; times in seconds.

    silence: a replica that says nothing for this long counts as hanging, if there are others.
    give_up: how long a stream may be without a replica, or at a silent one that is the only one.
    wake: how long a stream that no replica has had yet may wait, if that is longer than `give_up`. It is not kept once
        no replica is there, unless the model may sleep.
    losses: a stream that has lost this many different replicas without a new token in between is given up, so that a
        request which breaks engines does not go from one to the next for ever.
    """

    silence: float
    give_up: float
    wake: float = 0.0
    losses: int = 4

    @property
    def doubt(self) -> float:
        """Seconds of silence after which another replica is called too. One heartbeat may be late."""
        return max(self.silence / QUIET_SHARE, HEARTBEAT_SECONDS + LATE_SECONDS)


@dataclass(slots=True)
class CarriedRequest:
    """A request, and how far it came.

    base: the fingerprint of the model that it is for. emitted: the tokens that were passed on, the last of them at
    `heard_at`. kind: of the engine that has it, or had it last. longest: tokens that it may come to, those of its
    prompt among them, at the engine that had it first.
    replica: who has the request, or had it last. step: the last one passed on. attempts: how many were begun; rival:
    one beside that which is followed. losses: replicas lost since the last token, in turn, the first of them at
    `losing_since`; refused: those that said no, objection: what the last of them said, others: those of them that have
    another model; tries: calls that nobody accepted since one did; lost_at: since when nobody has the request; marks:
    of the prompt's prefixes.
    """

    request: Request
    base: str
    began: float = field(default_factory=time.monotonic)
    attempts: int = 0
    rival: Attempt | None = None
    emitted: list[int] = field(default_factory=list)
    heard_at: float = field(default_factory=time.monotonic)
    kind: EngineKind | None = None
    longest: int | None = None
    replica: str | None = None
    step: int = 0
    losses: list[str] = field(default_factory=list)
    losing_since: float = 0.0
    refused: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    objection: str = ""
    tries: int = 0
    lost_at: float | None = None
    cause: str = ""
    marks: bytes = b""

    def start(self, wait: float) -> Start:
        """What the next attempt begins with."""
        now, number = time.monotonic(), self.attempts
        self.attempts += 1
        name, emitted = f"{self.request.request_id}.{number}", tuple(self.emitted)
        waited, seconds = (now - self.heard_at, now - self.began) if number else (0.0, 0.0)
        request = replace(self.request, request_id=name, emitted=emitted, waited=waited)
        return Start(request, number, self.base, self.kind if self.emitted else None, self.step, seconds, wait)

    def at_fault(self, output: StepOutput, start: Start) -> bool:
        """Whether an attempt failed at what others had brought, before it brought anything: another may do better."""
        failed = output.finish is not None and output.finish.reason is FinishReason.ERROR
        resumed = len(start.request.emitted) == len(self.emitted)
        return failed and resumed and bool(self.emitted)

    def cut_short(self, output: StepOutput) -> bool:
        """Whether an answer, with this step, is at its end only because this engine has fewer positions than the first
        one had."""
        assert self.longest is not None
        ended = output.finish is not None and output.finish.reason is FinishReason.LENGTH
        wanted = min(self.longest, len(self.request.prompt) + self.request.params.max_tokens)
        return ended and len(self.request.prompt) + len(self.emitted) + len(output.tokens) < wanted

    def take(self, output: StepOutput, start: Start) -> StepOutput:
        """Note what a step of an attempt brought; the output as if there had been no other attempt before."""
        if output.tokens:
            self.emitted += output.tokens
            self.heard_at = time.monotonic()
            self.losses.clear()
        trace = output.trace
        if trace is None:
            return output
        self.step = start.step + trace.step
        return output._replace(trace=trace._replace(step=self.step, seconds=start.seconds + trace.seconds))


@dataclass(frozen=True, slots=True)
class Update:
    """What happened to a request since the last time, and the name of the replica where it did."""

    replica: str
    events: tuple[StepOutput | Refusal, ...]


class Carrier:
    """Carries requests over the replicas that there are."""

    def __init__(self, replicas: Replicas, patience: Patience, counts: StreamCounts, tracer: Tracer):
        self._replicas = replicas
        self._patience = patience
        self._counts = counts
        self._tracer = tracer
        self._channels = Channels(
            replicas.listen,
            patience.doubt,
            patience.silence,
            patience.give_up,
            lambda: set(replicas.replicas) - replicas.silent,
        )
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self, request: Request, base: str) -> AsyncGenerator[Update, None]:
        """What happens to a request for the model of the fingerprint `base`, up to its finish or a `Refusal`. Raises
        ApiError; however the caller stops, the request ends wherever it is."""
        carried = CarriedRequest(request, base, marks=self._replicas.marks(request))
        attempt = self._next(carried)
        try:
            while True:
                try:
                    async with aclosing(self._follow(carried, attempt)) as followed:
                        async for update in followed:
                            attempt.span.heard(update.replica, len(carried.emitted))
                            yield update
                    return
                except Lost as lost:
                    attempt.span.lost(lost.cause, lost.replica)
                    reason = lost
                except Exception as error:
                    attempt.span.failed(error)
                    raise
                self._leave(attempt)
                attempt = await self._recover(carried, attempt, reason)
        finally:
            self._leave(attempt)
            self._drop_rival(carried, "not needed")

    def _next(self, carried: CarriedRequest) -> Attempt:
        """An attempt anywhere."""
        # Who has the prefix may be the very one that does not answer: another attempt goes anywhere.
        marks = b"" if carried.tries else carried.marks
        avoid = self._replicas.silent | self._channels.quiet
        never = frozenset(carried.refused)
        return self._begin(carried, Route(never=never, avoid=avoid, marks=marks))

    def _begin(self, carried: CarriedRequest, route: Route) -> Attempt:
        start = carried.start(doubled(self._patience.silence, carried.tries, LONGEST_WAIT_SECONDS))
        route = replace(route, moved=bool(carried.emitted), counted=carried.replica is not None)
        span = AttemptSpan(self._tracer, carried.request.request_id, start.number, len(carried.emitted))

        def call(mailbox: str) -> Call:
            return self._replicas.generate(start.request, mailbox, start.kind, route)

        try:
            return Attempt(start, span, self._channels, call, self._patience.silence)
        except Exception as error:
            span.failed(error)
            span.over()
            raise

    def _leave(self, attempt: Attempt) -> None:
        if attempt.finished:  # its last words are still to come
            self._ending.add(attempt.listener)
            attempt.listener.add_done_callback(self._ending.discard)
        attempt.close()

    async def _follow(self, carried: CarriedRequest, attempt: Attempt) -> AsyncGenerator[Update, None]:
        """What an attempt brings. Raises Lost where another may go on."""
        heard = await attempt.opening()
        name = self._accepted(carried, attempt)
        while not attempt.finished:
            heard = heard or await attempt.heard()
            passed: list[StepOutput | Refusal] = []
            for item in heard:
                if attempt.finished:  # what befell the replica afterwards is nothing to this request
                    break
                if isinstance(item, LookAgain):
                    self._weigh(carried, attempt, name)
                elif isinstance(item, Refusal) and not carried.emitted:
                    passed.append(item)
                    attempt.finished = True
                elif isinstance(item, StepOutput) and not (ended_badly(item) or carried.at_fault(item, attempt.start)):
                    if carried.rival is not None:  # it goes on from before this step
                        self._drop_rival(carried, "late")
                    short = carried.cut_short(item) and bool(self._who_else(carried, name))
                    passed.append(carried.take(item._replace(finish=None) if short else item, attempt.start))
                    if short:
                        yield Update(name, tuple(passed))
                        raise Lost("fewer positions", refused=name)
                    attempt.finished = item.finish is not None
                else:
                    if passed:
                        yield Update(name, tuple(passed))
                    attempt.give_up(item)
            heard = []
            if passed:
                yield Update(name, tuple(passed))

    def _who_else(self, carried: CarriedRequest, name: str) -> set[str]:
        """The replicas that may take a request on in place of one."""
        return set(self._replicas.replicas) - self._replicas.silent - carried.refused - {name}

    def _weigh(self, carried: CarriedRequest, attempt: Attempt, name: str) -> None:
        """Begin or end a rival to an attempt, as its replica is quiet or not. Raises Lost where the rival has won; no
        step of the attempt is lost with it, for each of them ends the rival."""
        quiet = name in self._channels.quiet
        if carried.rival is None:
            if quiet:
                self._begin_rival(carried, attempt, name)
        elif carried.rival.won:
            raise Lost("quiet", name)
        elif carried.rival.over:
            self._drop_rival(carried, "failed")
        elif not quiet:
            self._drop_rival(carried, "spoke again")

    def _begin_rival(self, carried: CarriedRequest, attempt: Attempt, name: str) -> None:
        never = self._replicas.silent | self._channels.quiet | carried.refused
        if not set(self._replicas.replicas) - never:
            return
        log.info("%s is quiet: request %s is begun at another replica too", name, carried.request.request_id)
        try:
            carried.rival = self._begin(carried, Route(never=never, marks=carried.marks))
        except Exception as error:  # nothing of the attempt's, whose replica may speak again
            log.info("no rival for request %s: %s", carried.request.request_id, error)
            return
        self._counts.rival_begun()
        carried.rival.race(attempt)

    def _drop_rival(self, carried: CarriedRequest, cause: str) -> None:
        rival, carried.rival = carried.rival, None
        if rival is None:
            return
        if rival.over and isinstance(rival.failure, Lost):
            self._note(carried, rival.failure)
        rival.span.dropped(cause)
        self._leave(rival)

    def _note(self, carried: CarriedRequest, lost: Lost) -> None:
        """Keep clear of who lost an attempt, or would not have it."""
        if lost.refused is not None:
            carried.refused.add(lost.refused)
            if lost.cause == OTHER_MODEL:
                carried.others.add(lost.refused)
            carried.objection = f", and the last one said: {lost.cause}"
        if lost.replica is not None:
            self._replicas.silence(lost.replica)

    def _accepted(self, carried: CarriedRequest, attempt: Attempt) -> str:
        """Note who has the request now; gives the name."""
        accepted = attempt.accepted
        assert accepted is not None
        if carried.replica is not None:
            assert carried.lost_at is not None
            gap = attempt.accepted_at - min(carried.lost_at, attempt.began)
            self._counts.handed_over(carried.cause, gap)
            facts = {
                "request": carried.request.request_id,
                "attempt": attempt.start.number,
                "from": carried.replica,
                "to": accepted.replica,
                "tokens": len(carried.emitted),
                "cause": carried.cause,
                "gap_ms": round(gap * 1000),
            }
            log.warning("stream handed over %s", json.dumps(facts))
        carried.replica, carried.kind = accepted.replica, accepted.kind
        carried.longest = accepted.max_model_len if carried.longest is None else carried.longest
        carried.tries, carried.lost_at = 0, None
        return accepted.replica

    async def _recover(self, carried: CarriedRequest, attempt: Attempt, lost: Lost) -> Attempt:
        """What follows an attempt that is over: its rival, where there is one. Raises ApiError where nothing shall."""
        now, rival = time.monotonic(), carried.rival
        if carried.lost_at is None:
            carried.lost_at = now - lost.waited
        self._note(carried, lost)
        again = 0
        if attempt.accepted is not None or lost.replica is not None:
            carried.cause = lost.cause.partition(":")[0]  # what an engine says of it would be a series for each request
        if lost.replica is not None:
            again = carried.losses.count(lost.replica)
            carried.losing_since = carried.losing_since if carried.losses else now - lost.waited
            carried.losses.append(lost.replica)
        log.info("attempt %d of %s is over: %s", attempt.start.number, carried.request.request_id, lost.cause)
        if rival is None or not rival.won:
            self._check_patience(carried, now, lost)
        if rival is not None:
            carried.rival = None
            return rival
        if lost.replica is None or again:
            await asyncio.sleep(doubled(FIRST_PAUSE_SECONDS, again or carried.tries, LONGEST_PAUSE_SECONDS))
        carried.tries += lost.replica is None
        return self._next(carried)

    def _check_patience(self, carried: CarriedRequest, now: float, lost: Lost) -> None:
        """Raises ApiError where there shall be no further attempt."""
        assert carried.lost_at is not None
        patience, lost_ones = self._patience, len(set(carried.losses))
        there = set(self._replicas.replicas) - self._replicas.silent
        if not carried.emitted and there and there <= carried.others:
            raise model_changed() from lost
        if carried.replica is None and not self._replicas.replicas and not patience.wake:
            raise not_ready() from lost  # as whoever comes now is told: all went as this one came, at a stop perhaps
        give_up = patience.give_up if carried.replica is not None else max(patience.give_up, patience.wake)
        stuck = len(carried.losses) >= patience.losses and now - carried.losing_since > give_up
        if lost_ones >= patience.losses:
            why = f"{lost_ones} engine replicas were lost under this request"
        elif stuck:
            why = f"it was lost {len(carried.losses)} times in {now - carried.losing_since:.0f} s without a new token"
        elif lost.waited > patience.give_up:
            why = f"the only engine replica gave no sign of life for {lost.waited:.0f} s"
        elif now - carried.lost_at > give_up:
            why = f"no engine replica took this request on within {give_up:g} s{carried.objection}"
        else:
            return
        log.error("request %s is given up: %s (%s)", carried.request.request_id, why, lost.cause)
        raise ApiError(503, f"The server gave up: {why}. Try again.", code="replica_lost") from lost


def doubled(seconds: float, times: int, most: float) -> float:
    """Twice as long so many times, at most `most`."""
    return min(most, math.ldexp(seconds, min(times, MOST_DOUBLINGS)))
