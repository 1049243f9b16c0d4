"""Token shards: documents as token ids on disk, append-only, each file whole or absent.

A data directory holds `data.json` (for whom the tokens were made) and `shard-000000.safetensors`, …, each with

    tokens  int32 [tokens]     all documents, one behind the other
    own     uint8 [tokens]     1 where the token is the model's own (or text to learn from), 0 where it was given
    ends    int64 [documents]  where each document ends in `tokens`
    keys    int64 [documents]  hash of what the document answers: for telling duplicates and the held-out split
    kinds   int64 [documents]  index into `KINDS`
    jobs    int64 [documents]  which planned job the document came from
    done    int64 [any]        jobs that are finished with this shard, those that gave no document among them; below 0
                               the user's prompts, as `prompt_number` of their keys
    seconds float64 [1]        time spent on generating it
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from tidar_core.config import ConfigError
from tidar_core.convert.files import keep_file
from tidar_core.error_text import first_line

Kind = Literal["chat", "code", "text", "prompt", "file"]
KINDS: tuple[Kind, ...] = ("chat", "code", "text", "prompt", "file")

HEADER_FILE = "data.json"
HELD_OUT_SHARE = 0.04
_COLUMNS = {
    "tokens": np.int32, "own": np.uint8, "ends": np.int64, "keys": np.int64,
    "kinds": np.int64, "jobs": np.int64, "done": np.int64, "seconds": np.float64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """One text: token ids, which of them are the model's own, and where it came from."""

    tokens: tuple[int, ...]
    own: tuple[bool, ...]
    key: int
    kind: Kind
    job: int

    @property
    def own_tokens(self) -> int:
        return sum(self.own)


class DataHeader(BaseModel):
    """`data.json`: the model whose words these are, and the seed that fixes the planned jobs. fingerprint: of its
    weights; empty as long as there is nothing but given text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[1] = 1
    model: str
    fingerprint: str
    tokenizer: str
    seed: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in memory, column by column (see the module). Document i is tokens[ends[i-1] : ends[i]]."""

    tokens: np.ndarray
    own: np.ndarray
    ends: np.ndarray
    keys: np.ndarray
    kinds: np.ndarray
    jobs: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens (int32) and own (bool) of one document."""
        span = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        return self.tokens[span], self.own[span].astype(bool)

    def generated_tokens(self) -> int:
        """Tokens to learn from that the model generated."""
        generated = np.repeat(self.kinds != KINDS.index("file"), np.diff(self.ends, prepend=0))
        return int(self.own[generated].sum(dtype=np.int64))

    def split(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the documents to train on and of those that are held out, int64 each.

        The key decides, so that a document that was trained on is never held out later, whatever is added: those below
        `HELD_OUT_SHARE` of all keys are held out, and at least the two lowest. With two documents both are held out:
        if one of them were trained on, it could be among the two lowest once a higher one is added.
        """
        shares = (self.keys.view(np.uint64) >> np.uint64(11)).astype(np.float64) / 2.0**53
        order = np.argsort(shares, kind="stable")
        held_out = max(int((shares < HELD_OUT_SHARE).sum()), min(2, len(self)))
        return np.sort(order[held_out:]), order[:held_out]


def content_key(tokens: Sequence[int]) -> int:
    """A 64-bit hash of token ids, as a signed integer."""
    digest = hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def digest_of(columns: Iterable[np.ndarray]) -> str:
    """A hash of these arrays in this order, 12 hex digits; a value or a length that differs changes it."""
    digest = hashlib.blake2b(digest_size=6)
    for column in columns:
        digest.update(len(column).to_bytes(8, "little") + column.tobytes())
    return digest.hexdigest()


def prompt_number(key: int) -> int:
    """The number of the prompt with this key in the column `done`: negative, as no planned job's is."""
    return ~(key & (2**63 - 1))


@dataclass(frozen=True, slots=True)
class Stored:
    """What a data directory holds: the documents, the jobs that are done, the seconds spent on them."""

    corpus: Corpus
    done: set[int]
    seconds: float


class ShardStore:
    """A data directory: what is in it, and the place where new documents go. `header` is the one that lies there."""

    def __init__(self, directory: Path, header: DataHeader, notes: Sequence[str] = ()):
        self.directory = directory
        self.header = header
        self.notes = tuple(notes)
        self._next = 1 + max((_number(path) for path in _shard_paths(directory)), default=-1)

    def read(self) -> Stored:
        """All that is stored; without a last shard that was not written to its end, which may lie where nothing can be
        removed. Raises ConfigError for any other shard that cannot be read."""
        paths = _shard_paths(self.directory)
        shards = [_read_shard(path) for path in paths[:-1]]
        with suppress(_TornShard):
            shards += [_read_shard(path) for path in paths[-1:]]
        joined = {name: _join(shards, name, kind) for name, kind in _COLUMNS.items()}
        lengths = np.cumsum([0, *(len(shard["tokens"]) for shard in shards)])
        if shards:
            ends = [shard["ends"] + before for shard, before in zip(shards, lengths, strict=False)]
            joined["ends"] = np.concatenate(ends)
        done, seconds = set(joined.pop("done").tolist()), float(joined.pop("seconds").sum())
        return Stored(Corpus(**joined), done, seconds)

    def append(self, documents: Sequence[Document], done: Sequence[int], seconds: float) -> None:
        """Writes one more shard. Raises ConfigError on a full disk; what was there before is untouched."""
        columns = {
            "tokens": [token for document in documents for token in document.tokens],
            "own": [own for document in documents for own in document.own],
            "ends": np.cumsum([len(document.tokens) for document in documents]),
            "keys": [document.key for document in documents],
            "kinds": [KINDS.index(document.kind) for document in documents],
            "jobs": [document.job for document in documents],
            "done": sorted(done),
            "seconds": [seconds],
        }
        content = save({name: np.asarray(columns[name], dtype=kind) for name, kind in _COLUMNS.items()})
        keep_file(self.directory / f"shard-{self._next:06d}.safetensors", content)
        self._next += 1

    def check_seed(self, seed: int) -> None:
        """Raises ConfigError where jobs were planned with another seed than those to come."""
        if self.header.fingerprint and self.header.seed != seed:
            raise ConfigError(
                f"{self.directory} was begun with --seed {self.header.seed}: use it, or another directory"
            )

    def words_come_from(self, header: DataHeader) -> str:
        """To be called before a model's words are stored. Its header is kept where there are no words yet; gives a line
        for the user where there are words of other weights, else an empty one."""
        known = self.header
        if not known.fingerprint:
            _write_header(self.directory / HEADER_FILE, header)
            self.header = header
        elif known.fingerprint != header.fingerprint:
            return f"{self.directory} holds the words of other weights ({known.model}): they are trained on as they are"
        return ""


def open_store(directory: Path, header: DataHeader) -> ShardStore:
    """The data directory, created with this header or continued. `notes` of the result has lines for the user.

    A last shard that was not written to its end is removed, or left out where nothing can be written: its jobs run
    again. Raises ConfigError where it stays among others to come, where the tokens there come from another tokenizer,
    and where the directory cannot be made or read.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the data directory {directory} cannot be made ({error.strerror}): choose another --out, or --data where "
            "that was given"
        ) from None
    path, notes = directory / HEADER_FILE, list[str]()
    if path.exists():
        known = read_header(directory)
        if known.tokenizer != header.tokenizer:
            raise ConfigError(
                f"{directory} holds tokens of {known.model}, another tokenizer than {header.model}'s: choose another "
                "--out, or --data where that was given"
            )
        header = known
    else:
        _write_header(path, header)
    for left in _shard_paths(directory, ".part"):
        with suppress(OSError):  # it may lie where nothing can be removed, and it harms nobody
            left.unlink()
    shards = _shard_paths(directory)
    if shards:
        try:
            _read_shard(shards[-1])
        except _TornShard:
            what = f"{shards[-1].name}, which was not written to its end"
            try:
                shards[-1].unlink()
                notes.append(f"dropped {what}: its jobs run again")
            except OSError as error:
                if os.access(directory, os.W_OK):  # behind another it would no longer be the last, which may be torn
                    raise ConfigError(
                        f"{directory} holds {what} and cannot be removed ({error.strerror}): remove it"
                    ) from None
                notes.append(f"left out {what} and cannot be removed ({error.strerror}): its jobs count as not done")
    return ShardStore(directory, header, notes)


def _write_header(path: Path, header: DataHeader) -> None:
    keep_file(path, (header.model_dump_json(indent=2) + "\n").encode())


def read_header(directory: Path) -> DataHeader:
    """`data.json` of a data directory. Raises ConfigError."""
    path = directory / HEADER_FILE
    try:
        return DataHeader.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"no token shards at {directory}, which has no {HEADER_FILE}: give a folder that `tidar convert` filled"
        ) from None
    except (OSError, UnicodeDecodeError, ValidationError):
        raise ConfigError(
            f"{path} is not a readable header of token shards: delete that folder, or choose another"
        ) from None


def _shard_paths(directory: Path, suffix: str = "") -> list[Path]:
    """The shards in order; without what has such a name but no number, as a user's copy of one."""
    named = [path for path in directory.glob(f"shard-*.safetensors{suffix}") if _digits(path).isdecimal()]
    return sorted(named, key=_number)


def _number(path: Path) -> int:
    return int(_digits(path))


def _digits(path: Path) -> str:
    return path.name.partition(".")[0].removeprefix("shard-")


def _join(shards: list[dict[str, np.ndarray]], name: str, kind: type) -> np.ndarray:
    return np.concatenate([shard[name] for shard in shards]) if shards else np.zeros(0, kind)


class _TornShard(ConfigError):
    """A shard that was not written to its end."""


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    """The columns of a shard. Raises `_TornShard` where it was not written to its end, ConfigError for all else."""
    made_anew = "delete it, and its part is made anew"
    try:
        columns = load_file(path)
        problem = next(_problems(columns), None)
    except OSError as error:
        raise ConfigError(
            f"the shard {path} cannot be read ({error.strerror or error}): see to the disk or the file's permissions, "
            "and start again"
        ) from None
    except SafetensorError as error:
        raise _TornShard(f"the shard {path} cannot be read ({first_line(error)}): {made_anew}") from None
    except ValueError as error:
        problem = first_line(error)
    if problem is not None:
        raise ConfigError(f"the shard {path} cannot be read ({problem}): {made_anew}")
    return columns


def _problems(columns: dict[str, np.ndarray]) -> Iterator[str]:
    """What is wrong with a shard that could be read."""
    for name, kind in _COLUMNS.items():
        if name not in columns or columns[name].dtype != kind or columns[name].ndim != 1:
            yield f"it has no column {name}"
            return
    ends, documents = columns["ends"], len(columns["ends"])
    if any(len(columns[name]) != documents for name in ("keys", "kinds", "jobs")):
        yield "its columns do not fit each other"
    elif len(columns["own"]) != len(columns["tokens"]) or (ends[-1] if documents else 0) != len(columns["tokens"]):
        yield "its documents do not end where its tokens do"
    elif np.any(np.diff(ends, prepend=0) <= 0):
        yield "its documents are out of order"
