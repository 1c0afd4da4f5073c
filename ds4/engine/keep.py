"""What of a sequence is kept for later ones: its text, its compressed rows once, and points that it can go back to.

Compressed rows and index keys are written once, when their group closes, so those of a shorter text are the first
ones of a longer text that begins with it. Window rings, open groups and the draft head's rings are overwritten as a
sequence goes on: these are kept point by point. A kept text therefore takes its rows once (the 890 bytes a token of
the released model) and a few megabytes a point, whatever the number of points.

`Rules` say how many tokens of a new prompt a point saves without a change of a bit of the answer:

    full    prefill gives the same bits however a prompt is cut, and the newest `SLACK` positions can be taken back:
            a point at p serves every prompt that shares at least its first p - SLACK tokens
    replay  the layers from the last kv source on run for the last window of a sync only, over rows of that window
            alone. Reading on from p hides all older rows of those layers if it adds more than a window: then, and
            only then, the two syncs leave the bits of one
    decode  rows that decode made differ from prefill's in their rounding: nothing beyond `exact` counts, unless asked
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ds4 import __version__
from ds4.base.mark import file_mark
from ds4.engine.draft_state import DraftSnapshot
from ds4.engine.session import SessionSnapshot
from ds4.engine.state import SLACK, Snapshot
from ds4.errors import Ds4Error, FileFormatError

if TYPE_CHECKING:
    from ds4.engine.engine import Engine

MOST_POINTS = 8  # of a text
LEG_STEPS = (1, 4, 16, 64)  # how far before a prompt's end points lie, in chunks: questions are short, documents long
_SHARED = ("comp", "keys")  # arrays whose rows are written once


@dataclass(frozen=True)
class Mark:
    """A point's numbers.

    Attributes:
        position: tokens that the state holds.   written: as SequenceState's.
        first: lowest window row of the layers from the last kv source on.
        exact: so many leading tokens are as prefill leaves them, and not decode.
        whole: its logits are there, and are those of one sync of exactly its tokens.
    """

    position: int
    written: int
    first: int
    exact: int
    whole: bool


@dataclass(frozen=True)
class Point:
    """A state without its shared rows; `lengths`: bytes of each shared array that it has."""

    mark: Mark
    state: Snapshot
    lengths: dict[str, int]
    prompt: int
    logits: NDArray[np.float32] | None
    draft: DraftSnapshot | None

    @property
    def nbytes(self) -> int:
        logits = 0 if self.logits is None else self.logits.nbytes
        return self.state.nbytes + logits + (0 if self.draft is None else self.draft.nbytes)


@dataclass(frozen=True)
class Saved:
    """A text with points, by rising position, the last at its end; `rows` u8: the shared arrays of that one.

    Immutable: a longer text of the same rows is another `Saved`, which shares what it can.
    """

    tokens: NDArray[np.int32]
    rows: dict[str, NDArray[np.uint8]]
    points: tuple[Point, ...]

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + sum(a.nbytes for a in self.rows.values()) + sum(p.nbytes for p in self.points)

    @property
    def marks(self) -> tuple[Mark, ...]:
        return tuple(p.mark for p in self.points)

    def snapshot(self, i: int) -> SessionSnapshot:
        """What `Session.restore` takes, of point i."""
        p = self.points[i]
        shared = {name: self.rows[name][:n] for name, n in p.lengths.items()}
        state = replace(p.state, arrays={**p.state.arrays, **shared})
        tokens = tuple(int(t) for t in self.tokens[: p.mark.position])
        return SessionSnapshot(tokens, p.prompt, state, p.logits, (), None, p.draft)


def save(
    snapshot: SessionSnapshot, exact: int, older: Sequence[Point] = (), *, whole: bool = True, gap: int = 0
) -> Saved:
    """A sequence as it is, with those `older` points, by rising position, that lie before it: of the same rows.

    Args:
        snapshot: no drawn tokens wait in it (Session.rollback to its own length takes them back).
        exact: leading tokens whose rows prefill made.
        whole: its logits are those of one sync of these tokens.
        gap: tokens that are read again so quickly that no point is kept to save them.

    Raises:
        Ds4Error: drawn tokens wait.
    """
    if snapshot.waiting:
        raise Ds4Error("a state with drawn tokens that nobody asked for cannot be kept: take them back first")
    state = snapshot.state
    shared = {name: a for name, a in state.arrays.items() if name.partition(".")[0] in _SHARED}
    own = {name: a for name, a in state.arrays.items() if name not in shared}
    at = state.position
    whole = whole and snapshot.logits is not None and len(snapshot.tokens) == at
    mark = Mark(at, state.written, state.first[1], min(exact, at), whole)
    lengths = {name: a.nbytes for name, a in shared.items()}
    logits = snapshot.logits if whole else None
    point = Point(mark, replace(state, arrays=own), lengths, min(snapshot.prompt, at), logits, snapshot.draft)
    tokens = np.asarray(snapshot.tokens[:at], np.int32)
    return Saved(tokens, shared, _thinned([*(p for p in older if p.mark.position < at), point], gap))


def _thinned(points: Sequence[Point], gap: int) -> tuple[Point, ...]:
    """None without which less than `gap` tokens lie between its neighbours, but for the last two. Then, while there
    are more than `MOST_POINTS`, the one goes whose gap is smallest for how far it is from the end, so that they lie
    the closer the nearer to the end.
    """
    kept: list[Point] = []
    for i, p in enumerate(points):
        before = kept[-1].mark.position if kept else 0
        if i + 2 >= len(points) or points[i + 1].mark.position - before >= gap:
            kept.append(p)
    while len(kept) > MOST_POINTS:
        at = [0, *(p.mark.position for p in kept)]
        end = at[-1]
        gaps = [(at[i + 2] - at[i]) / (1 + end - at[i + 1]) for i in range(len(kept) - 1)]
        del kept[gaps.index(min(gaps))]
    return tuple(kept)


@dataclass(frozen=True)
class Rules:
    """What of a kept text serves a new prompt.

    Attributes:
        window: the sliding window.   bounded: prefill is bounded replay.   chunk: positions a prefill pass.
        decoded: rows that decode made, and windows that go on over a cut, are as good.
    """

    window: int
    bounded: bool
    chunk: int
    decoded: bool

    def least(self, mark: Mark) -> int:
        """Tokens that a prompt shares with the point's text at least, to be served by it."""
        if self.bounded:
            return mark.position
        return max(1, min(mark.position, mark.written - SLACK))

    def kept(self, mark: Mark, common: int, wanted: int) -> int:
        """Tokens that a sync of `wanted` tokens, the first `common` of them being the point's text, keeps of it; 0:
        it is of no use, or would change the answer.
        """
        common = min(common, mark.position)
        if common < self.least(mark):
            return 0
        if common == wanted == mark.position and mark.whole and mark.exact >= wanted:
            return wanted
        keep = min(common, wanted - 1)
        if keep < self.least(mark) or not (self.decoded or keep <= mark.exact):
            return 0
        if self.bounded and wanted - keep <= self.window and not (self.decoded and mark.first < mark.position):
            return 0
        return keep

    def mark(self, position: int, *, whole: bool) -> Mark:
        """Of a point that a prompt will leave, at its end or on the way there."""
        first = 0 if not self.bounded else max(0, position - self.window) if whole else position
        return Mark(position, position, first, position, whole)

    def same(self, mark: Mark, kept: int, wanted: int) -> bool:
        """Whether a sync that kept so much leaves the bits of one from the start."""
        return kept <= mark.exact and (not self.bounded or kept == wanted or wanted - kept > self.window)

    def last(self, wanted: int) -> int:
        """The deepest point, but for the end, of a prompt."""
        return wanted - self.window - 1 if self.bounded else wanted - 1

    def legs(self, kept: int, wanted: int, shared: int, least: int) -> list[int]:
        """Where to stop while `wanted` tokens are read of which the first `kept` are there: at points, then the end.

        Points lie whole chunks after `kept`, so that they cost no pass. One more is where the prompt leaves the texts
        that are known already, `shared`: others will leave them there too.

        Args:
            least: a point before it is not worth its memory.
        """
        last = self.last(wanted)
        found = {last} if self.bounded else set()
        found |= {wanted - 1 - n * self.chunk for n in LEG_STEPS}
        ends = {kept + (p - kept) // self.chunk * self.chunk for p in found if p <= last and p > kept}
        ends.add(shared)
        return [*sorted(p for p in ends if max(kept + 1, least) <= p <= last), wanted]


def rules_of(engine: Engine, *, decoded: bool) -> Rules:
    """The rules of an engine's sessions."""
    c, options = engine.config, engine.options
    return Rules(c.sliding_window, options.prefill == "replay" and c.last_kv_source >= 0, options.chunk, decoded)


def can_keep(engine: Engine) -> bool:
    """Not with the vendor's index keys: there decode scores the keys of whichever source closed a group in the last
    call, so that an answer depends on how its prompt was cut.
    """
    return engine.options.index_keys == "owner"


def identity_of(engine: Engine) -> str:
    """64 hex digits of all that decides about a bit of a state: base, shards, sidecars, options, kernels, code.

    Raises:
        FileFormatError: a file of the model is gone.
    """
    base, options, device = engine.base, engine.options, engine.device
    tables = [base.engram_table(g) for g in range(len(base.config.engram_layer_ids))]
    parts = {
        "base": _mark_of(base.path),
        "shards": [(_mark_of(t.path), t.weight_offset, t.scale_offset) for t in tables],
        "sidecars": {name: one and one["fingerprint"] for name, one in engine.sidecars.items()},
        "numerics": [options.numerics.act, options.numerics.kv, options.prefill, options.index_keys],
        "drafts": engine.draft is not None,
        "device": [device.info.name, device.info.arch, device.variant],
        "kernels": device.builder.mark(device.variant, device.info.arch),
        "code": _code_mark(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _mark_of(path: Path) -> str:
    try:
        info = path.stat()
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
    return _mark_at(path, info.st_size, info.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _mark_at(path: Path, size: int, changed: int) -> str:
    """Read once, until the file is another: a reload asks again."""
    return file_mark(path, 32)


@functools.cache
def _code_mark() -> str:
    """Which launches a pass is made of, and with which splits, stands in Python."""
    h = hashlib.sha256(__version__.encode())
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent / "device"):
        for path in sorted(folder.rglob("*.py")):
            h.update(f"{path.relative_to(here.parent)}\n".encode() + path.read_bytes())
    return h.hexdigest()


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32] | Sequence[int]) -> int:
    """Leading tokens that both have."""
    other = np.asarray(b, np.int32)
    n = min(len(a), len(other))
    different = np.flatnonzero(a[:n] != other[:n])
    return int(different[0]) if len(different) else n
