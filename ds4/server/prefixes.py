"""Prompts that begin like earlier ones are not read again: which states are kept, where, and which one serves.

A state is copied to the host when a prompt was read, and at points on the way there (ds4/engine/keep.py); a later
prompt goes on from the point that saves it most. Nothing is held on the device. A longer text takes the place of one
that it goes on from.

Two modes (docs/prefixes.md): `exact` goes on from nothing that could change a bit of an answer; `decoded` also keeps
what decode made of an answer. Everything here belongs to the device's thread, but for what says otherwise.
"""

from __future__ import annotations

import bisect
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from ds4.engine import Engine
from ds4.engine.keep import Point, Rules, Saved, can_keep, common_prefix, identity_of, rules_of, save
from ds4.engine.session import SessionSnapshot
from ds4.errors import CapacityError, Ds4Error
from ds4.server.prefix_folder import PrefixFolder
from ds4.server.prefix_index import BLOCK, Candidate, Entry, chain_of, common_blocks
from ds4.server.prefix_store import PrefixStats, PrefixStore
from ds4.server.request import ServedEngine, ServedSession

LEAST = 256  # tokens: a shorter text is read in one pass
LEG = 16  # chunks at most that are read at one go: in between, points can still be added

log = logging.getLogger("ds4.server")


class KeptSession(Protocol):
    """What is asked of a session; see ds4.engine.Session."""

    tokens: list[int]

    @property
    def position(self) -> int: ...
    def snapshot(self) -> SessionSnapshot: ...
    def restore(self, snapshot: SessionSnapshot) -> None: ...
    def rollback(self, position: int) -> None: ...
    def reserve(self, tokens: int) -> None: ...
    def reading(
        self, tokens: Sequence[int], *, logits: str = "last", part: bool = False
    ) -> Generator[tuple[int, int], None, object]: ...


@dataclass(frozen=True)
class Model:
    """Whose states they are, and what may be done with them."""

    identity: str
    rules: Rules


def model_of(engine: ServedEngine, decoded: bool) -> Model | None:
    """None: nothing of this engine can be kept."""
    real = cast(Engine, engine)
    return Model(identity_of(real), rules_of(real, decoded=decoded)) if can_keep(real) else None


@dataclass
class _Claim:
    """A session under way: where it began, what was kept of it.

    `older`: points of its own text.   `exact`, `whole`: see keep.save.   `at`: the deepest point.
    """

    model: Model
    prompt: NDArray[np.int32]
    shared: int
    at: int = 0
    older: tuple[Point, ...] = ()
    exact: int = sys.maxsize
    whole: bool = True
    entry: Entry | None = None  # kept of it last
    replaces: Entry | None = None  # a text that this one goes on from, with all of its points
    points: list[int] = field(default_factory=list)  # that are still to come
    leg: int = 0  # where the leg ends that is being read
    outgrown: bool = False  # there is no room for it, nor for anything longer


@dataclass(frozen=True)
class _Match:
    """A point of a text whose first `common` tokens are a prompt's; a session on it keeps `kept` of these."""

    candidate: Candidate
    saved: Saved
    common: int
    kept: int
    on_disk: bool


class Prefixes:
    """Kept texts of one server.

    Args:
        memory_bytes: of states in memory.
        folder: where they are written; None: nowhere.
        decoded: keep what decode made, too.
        least: tokens of a text that is worth keeping.
        model_of: whose states an engine's are; None: they cannot be kept.
    """

    def __init__(
        self,
        memory_bytes: int,
        folder: PrefixFolder | None = None,
        *,
        decoded: bool = False,
        least: int = LEAST,
        model_of: Callable[[ServedEngine, bool], Model | None] = model_of,
    ) -> None:
        self._store = PrefixStore(memory_bytes, folder)
        self._decoded, self._least, self._model_of = decoded, max(1, least), model_of
        self._known: tuple[ref[ServedEngine], str, Model | None] | None = None
        self._told: set[str] = set()  # identities whose foreigners were counted
        self._claims: WeakKeyDictionary[KeptSession, _Claim] = WeakKeyDictionary()

    @property
    def stats(self) -> PrefixStats:
        """As they are now; any thread may ask."""
        return self._store.stats

    def flush(self) -> None:
        """Wait until what was to be written is; any thread."""
        self._store.flush()

    def begin(self, engine: ServedEngine, prompt_ids: Sequence[int]) -> tuple[ServedSession, int]:
        """A session for this prompt, and how many of its tokens are in it already and will not be run again."""
        model = self._look_at(engine)
        if model is None:
            return engine.session(), 0
        prompt = np.asarray(prompt_ids, np.int32)
        chain = chain_of(prompt, model.identity)
        claim = _Claim(model, prompt, self._store.asked(chain, len(prompt)))
        found = self._find(claim, chain)
        session, kept = engine.session(), 0
        if found is not None:
            try:
                cast(KeptSession, session).restore(found.saved.snapshot(found.candidate.point))
            except CapacityError as e:  # the text is as good as before
                self._store.refuse("memory", f"no room on the device for a kept text: {e}")
                session = engine.session()
            except Ds4Error as e:
                self._store.drop(found.candidate.entry, "unfit", f"a kept text is not used: {e}")
                session = engine.session()
            else:
                kept = self._go_on(claim, found)
        self._claims[cast(KeptSession, session)] = claim
        return session, kept

    def reading(self, session: ServedSession, prompt_ids: Sequence[int]) -> Generator[tuple[int, int], None, None]:
        """`Session.reading` of a prompt that `begin` was told of; its state is kept on the way and at the end.

        Yields:
            before each chunk: positions run, and all that will be run.

        `close` between two chunks keeps what was read, where that can be gone on from.
        """
        kept, wanted, ran = cast(KeptSession, session), len(prompt_ids), 0
        claim = self._claims.get(kept)
        if claim is None:
            yield from kept.reading(prompt_ids)
            return
        rules = claim.model.rules
        kept.reserve(wanted)  # who finds no room learns it before the first leg, not at the last one
        claim.points = rules.legs(claim.at, wanted, claim.shared, self._least)
        while claim.points:
            point, last = claim.points[0], len(claim.points) == 1
            end = point if last else min(point, kept.position + LEG * rules.chunk)
            claim.leg, count = end, 0
            leg = kept.reading(prompt_ids[:end], logits="last" if last else "none", part=not last)
            try:
                for done, count in leg:
                    yield ran + done, ran + count + wanted - end
            except GeneratorExit:
                leg.close()
                self.ended(session)
                raise
            ran += count
            if end < point:
                continue
            del claim.points[0]
            if self._least <= kept.position and claim.at < kept.position:
                self._keep(kept, claim, write=last and not self._decoded)

    def worth_waiting(self, engine: ServedEngine, reading: ServedSession, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt that nobody has begun had better wait until a session has read its own, and go on from it.

        In turns with it, it would end after twice the tokens of the shorter one and the rest of the longer one; after
        it, when both are read but for what they share.
        """
        claim, model = self._claims.get(cast(KeptSession, reading)), self._look_at(engine)
        if claim is None or model is None or model.identity != claim.model.identity:
            return False
        prompt, other, rules = np.asarray(prompt_ids, np.int32), len(claim.prompt), model.rules
        common = common_prefix(claim.prompt, prompt)
        coming = max(
            (rules.kept(rules.mark(p, whole=p == other), common, len(prompt)) for p in claim.points), default=0
        )
        parting = min(common, rules.last(other), rules.last(len(prompt))) // BLOCK * BLOCK
        more = parting if parting > max(claim.leg, self._least, coming + rules.chunk) else 0
        chain = chain_of(prompt, model.identity)
        there = self._promised(model, chain, len(prompt))
        left = other - cast(KeptSession, reading).position
        gain = max(coming, more) - there
        if gain < max(rules.chunk, left - (len(prompt) - there)):
            return False
        if more:  # where the two part, there will be a point
            bisect.insort(claim.points, more)
        return True

    def ended(self, session: ServedSession, *, sound: bool = True) -> None:
        """The answer is done, or was given up; `sound`: the session's state can be relied on."""
        kept = cast(KeptSession, session)
        claim = self._claims.pop(kept, None)
        if claim is None or not sound:
            return
        wanted = len(claim.prompt)
        try:
            answered = len(kept.tokens) > wanted
            if answered and self._decoded:
                kept.rollback(len(kept.tokens))  # what was drawn and not asked for
                claim.exact = min(claim.exact, wanted)
            new = kept.position > claim.at and kept.position >= self._least
            if new and (self._decoded or not answered):
                self._keep(kept, claim, write=True)
            elif claim.entry is not None and claim.entry.saved is not None and not claim.entry.writing:
                self._store.write(claim.entry, claim.entry.saved, claim.replaces)
        except Ds4Error as e:
            self._store.refuse("unfit", f"the state of an answer cannot be kept: {e}")

    def forget(self) -> None:
        """Nothing is held in memory any more; files stay, they belong to the model that they were made by."""
        self._known = None
        self._store.forget()

    def close(self) -> None:
        """Write what waits, and leave the folder to others."""
        self._store.close()

    # ---- finding ----

    def _look_at(self, engine: ServedEngine) -> Model | None:
        """Whose states an engine's are: asked again when it has other sidecars."""
        sidecars = repr(engine.sidecars)
        if self._known is not None and self._known[0]() is engine and self._known[1] == sidecars:
            return self._known[2]
        try:
            model = self._model_of(engine, self._decoded)
        except Ds4Error as e:
            log.warning("warning: prompts are read from their beginning: %s", e)
            model = None
        self._known = (ref(engine), sidecars, model)
        if model is not None and model.identity not in self._told:
            self._told.add(model.identity)
            self._store.foreign(model.identity)
        return model

    def _promised(self, model: Model, chain: bytes, wanted: int) -> int:
        """Tokens that a prompt would probably not run again, by hashes alone."""
        for group in self._store.find(chain, model.identity):
            most = 0
            for c in group:
                least = common_blocks(c.entry.chain, chain) * BLOCK
                ends = (least, min(c.mark.position, wanted, least + BLOCK - 1))
                most = max(most, *(model.rules.kept(c.mark, n, wanted) for n in ends))
            if most:
                return most
        return 0

    def _find(self, claim: _Claim, chain: bytes) -> _Match | None:
        """The point that saves most."""
        wanted, rules = len(claim.prompt), claim.model.rules
        for group in self._store.find(chain, claim.model.identity):
            best: _Match | None = None
            for c in group:
                least = common_blocks(c.entry.chain, chain) * BLOCK
                most = min(c.mark.position, wanted, least + BLOCK - 1)
                so_far = best.kept if best else 0
                if most <= so_far or not any(rules.kept(c.mark, n, wanted) for n in (least, most)):
                    continue
                on_disk = c.entry.saved is None
                saved = self._store.text(c.entry)
                if saved is None:
                    continue
                common = common_prefix(saved.tokens, claim.prompt)
                if common < least:
                    self._store.drop(c.entry, "other_text", "a kept text has a prompt's hashes and other tokens")
                    continue
                kept = rules.kept(c.mark, common, wanted)
                if kept > so_far:
                    best = _Match(c, saved, common, kept, on_disk)
            if best is not None:
                return best
        return None

    def _go_on(self, claim: _Claim, found: _Match) -> int:
        """The session holds that point: what becomes of its text. Returns the tokens that are kept."""
        mark, kept, wanted = found.candidate.mark, found.kept, len(claim.prompt)
        claim.at = kept
        claim.exact = sys.maxsize if kept <= mark.exact else mark.exact
        claim.whole = claim.model.rules.same(mark, kept, wanted)
        own = kept  # how far its rows are those of this session, now or when it has read them again
        if claim.exact == sys.maxsize:
            own = max(kept, min(found.common, found.saved.marks[-1].exact))
        claim.older = tuple(p for p in found.saved.points if p.mark.position <= own)
        if len(claim.older) == len(found.saved.points) and len(found.saved.tokens) < wanted:
            claim.replaces = found.candidate.entry
        self._store.served(found.candidate.entry, kept, found.on_disk)
        return kept

    # ---- keeping ----

    def _keep(self, session: KeptSession, claim: _Claim, *, write: bool) -> None:
        if claim.outgrown:
            return
        if claim.entry is not None:  # its rows are in what follows: there need not be memory for both
            self._store.outdated(claim.entry)
        try:
            chunk = claim.model.rules.chunk
            saved = save(session.snapshot(), claim.exact, claim.older, whole=claim.whole, gap=chunk)
        except MemoryError:
            self._store.refuse("memory", f"the host has no memory to keep {session.position} tokens")
            return
        new = saved.points[-1]
        older = [p for p in claim.older if p.mark.position != new.mark.position]
        claim.older = tuple(sorted([*older, new], key=lambda p: p.mark.position))
        claim.at = new.mark.position
        identity = claim.model.identity
        entry = Entry(identity, chain_of(saved.tokens, identity), saved.marks, nbytes=saved.nbytes)
        before = [] if claim.entry is None else [claim.entry]
        if claim.replaces is not None and len(saved.tokens) >= claim.replaces.marks[-1].position:
            before.append(claim.replaces)
        claim.entry = entry
        claim.outgrown = not self._store.add(entry, saved, before, write=write, replaced=claim.replaces)
