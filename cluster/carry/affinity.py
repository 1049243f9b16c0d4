"""Which replica has the longest part of a prompt computed already, and whether it has room. No Ray in here.

What a replica's cache holds it publishes every few seconds, as marks: short hashes of prefixes, every 64 tokens at
first and every 2,048 at last by the pages' usual size (`tidar_core.prefixes`). What was sent where since then the
router remembers itself, so that prompts that begin alike meet in one place from the second on, also where all come at
the same moment.

A stream that moves has to be computed anew as far as it came, while its reader waits. So streams that move together are
shared out, each to the replica that got the fewest of them, though another has fewer answers under way.
"""

import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidar_core.prefixes import split_marks

REMEMBERED = 65_536  # marks that a router remembers itself
REMEMBER_SECONDS = 30.0  # prefill and publication take a while; after that what is published counts alone
MOVED_SECONDS = 1.5  # streams move together where they come within so many
SPARE, TIMES = 4, 2.0  # overloaded: more than so many answers over so many times the least busy one's
CROWDED = 0.9  # of the K/V pages: new answers would soon push others out


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that a call may go to. load: answers under way there. pages: share of its K/V pages that they own.
    depth: how many of the prompt's marks it has. moved: streams that it just got, where the call is for another one."""

    load: float
    pages: float = 0.0
    depth: int = 0
    moved: int = 0


def best(candidates: Sequence[Candidate], chance: random.Random) -> int:
    """The place of the replica to call: the one with the longest prefix of those that are not overloaded, the least
    busy where several have as much; where none has any, the less busy of two by chance. Streams that moved there count
    for more than what is under way."""
    # For each that one got, others may have more under way: else the one that was idle would get them all.
    least = min(candidate.load for candidate in candidates) + max(candidate.moved for candidate in candidates)
    roomy = any(candidate.pages <= CROWDED for candidate in candidates)

    def has_room(candidate: Candidate) -> bool:
        return candidate.load <= TIMES * least + SPARE and (candidate.pages <= CROWDED or not roomy)

    places = list(range(len(candidates)))
    places = [place for place in places if has_room(candidates[place])] or places
    fewest = min(candidates[place].moved for place in places)
    places = [place for place in places if candidates[place].moved <= TIMES * fewest + SPARE]
    depth = max(candidates[place].depth for place in places)
    if depth:
        tried = [place for place in places if candidates[place].depth == depth]
        chance.shuffle(tried)
    else:
        tried = chance.sample(places, min(2, len(places)))
    return min(tried, key=lambda place: (candidates[place].moved, candidates[place].load))


@dataclass(frozen=True, slots=True)
class Published:
    """What a replica told last: the marks of its cached prefixes, its answers under way, its share of pages in use."""

    stats: Mapping[str, Any]
    marks: frozenset[bytes]
    load: float
    pages: float


NOTHING = Published({}, frozenset(), 0.0, 0.0)


class Prefixes:
    """What a router knows of replicas, by name: what they published, and what it sent there itself."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._published: dict[str, Published] = {}
        self._sent: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def read(self, name: str, stats: Mapping[str, Any]) -> Published:
        """What a replica's stats say (`EngineReplica.record_routing_stats`). Marks are split where they are new: with
        each replica's news Serve hands out those of all others once more, as new objects."""
        known = self._published.get(name, NOTHING)
        if known.stats is not stats and stats:
            same = stats["marks"] == known.stats.get("marks")
            marks = known.marks if same else frozenset(split_marks(stats["marks"]))
            known = self._published[name] = Published(stats, marks, stats["load"], stats["pages"])
        return known

    def keep(self, names: Sequence[str]) -> None:
        """Forget what all others published."""
        if len(self._published) > len(names):
            self._published = {name: known for name, known in self._published.items() if name in names}

    def depth(self, name: str, marks: Sequence[bytes]) -> int:
        """How many of a prompt's marks, shortest prefix first, a replica has or will have soon."""
        published = self._published.get(name, NOTHING).marks
        recent = self._now() - REMEMBER_SECONDS
        for count in range(len(marks), 0, -1):
            mark = marks[count - 1]
            if mark in published or self._sent.get((name, mark), recent) > recent:
                return count
        return 0

    def sent(self, name: str, marks: Sequence[bytes]) -> None:
        """Note that a prompt goes to a replica."""
        now = self._now()
        for mark in marks:
            self._sent[name, mark] = now
            self._sent.move_to_end((name, mark))
        while len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)


class Recent:
    """How often something was noted of each replica within the last `seconds`."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._now = now
        self._moments: dict[str, deque[float]] = {}

    def note(self, name: str) -> None:
        self._moments.setdefault(name, deque()).append(self._now())

    def count(self, name: str) -> int:
        moments = self._moments.get(name, ())
        while moments and moments[0] <= self._now() - self._seconds:
            self.drop_one(name)
        return len(moments)

    def drop_one(self, name: str) -> None:
        """Forget the oldest note of a replica, where there is one."""
        if name in self._moments:
            self._moments[name].popleft()
            if not self._moments[name]:  # names are never used again
                del self._moments[name]
