"""A base file becomes a model on a device, and hands out sessions.

Opening reads headers, tables, gains and codebooks (ds4.base refuses what it does not know), places every weight once
and keeps the n-gram tables on disk behind the row store.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ds4.base.reader import Base
from ds4.device import Device
from ds4.engine.budget import StateBudget, free_bytes
from ds4.engine.draft_weights import DraftWeights, draft_bytes, place_draft
from ds4.engine.lane import Lane, SessionOptions
from ds4.engine.layer import Numerics
from ds4.engine.mount import Mounted, mount
from ds4.engine.ngrams import NgramFeed
from ds4.engine.scheduler import DraftLedger, DraftPolicy, FixedDrafts, Scheduler
from ds4.engine.scratch import Workspace
from ds4.engine.session import PLAIN, Session
from ds4.engine.slots import MAX_ROWS
from ds4.engine.together import Ask, Together
from ds4.engine.weights import ModelWeights, kernel_constants, place, placed_bytes
from ds4.engram.store import RowStore
from ds4.engram.tables import EngramTables
from ds4.errors import CapacityError, UsageError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer

CHOICES = {
    "activations": ("bf16", "f32"),
    "kv": ("fp4", "f32"),
    "prefill": ("full", "replay"),
    "index_keys": ("owner", "released"),
    "draft": ("drawn", "argmax"),
}


@dataclass
class Engine:
    """One model on one device. `draft` is the draft head, where sessions draft; its block may be smaller than the
    model's. Lanes of as many as `sessions` that ended are kept for the next ones.
    """

    base: Base
    device: Device
    tokenizer: Tokenizer
    weights: ModelWeights
    feed: NgramFeed
    options: SessionOptions
    workspace: Workspace
    draft: DraftWeights | None = None
    block: int = 0
    draft_k: int | None = None
    mounted: Mounted | None = None
    bare: ModelWeights | None = None  # without sidecars; its buffers are shared
    sessions: int = 1
    _idle: list[Lane] = field(default_factory=list)
    _ledger: DraftLedger = field(default_factory=DraftLedger)  # of the sessions that schedule their drafts
    _ledgers: dict[int, DraftLedger] = field(default_factory=dict)  # the same for passes of so many sessions
    _together: Together | None = None

    @property
    def config(self) -> ModelConfig:
        return self.base.config

    @property
    def name(self) -> str:
        """What the server calls the model: the file's stem."""
        return Path(self.base.path).stem

    @property
    def sidecars(self) -> dict[str, dict[str, str] | None]:
        """What is mounted under "zchain" and "posttrain": the folder's name and its files' fingerprint, or None."""
        return {"zchain": None, "posttrain": None} if self.mounted is None else self.mounted.describe()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What people should know of what is mounted."""
        return () if self.mounted is None else self.mounted.warnings

    @staticmethod
    def open(
        path: str | Path,
        *,
        engram_dir: str | Path | None = None,
        activations: str = "bf16",
        kv: str = "fp4",
        prefill: str = "full",
        index_keys: str = "owner",
        chunk: int = 512,
        graphs: bool = True,
        dspark: bool = False,
        dspark_block: int | None = None,
        draft_k: int | None = None,
        draft: str = "drawn",
        zchain: str | Path | None = None,
        posttrain: str | Path | None = None,
        device: Device | None = None,
        mem_budget_mb: int | None = None,
        sessions: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Open a base file.

        Args:
            engram_dir: folder of the two n-gram shards; beside the base if not given.
            activations: "bf16", or "f32" to compare with a float32 reference (prefill then by FMA).
            kv: "fp4" as stored, or "f32".
            prefill: "full", or "replay" (bounded; prefill.py).
            index_keys: "owner", or "released" (the vendor's decode quirk, model-text 6).
            chunk: positions a prefill pass.
            dspark: draft with the model's draft head, if it has one (draft.py); the tokens stay what they are.
            dspark_block: drafts a round at most; None: as many as the model's block has.
            draft_k: drafts to verify in every round; None: a scheduler decides (scheduler.py).
            draft: without a seed, drafts are "drawn" from the draft head, or its likeliest tokens, "argmax".
            zchain: folder of a domain's sidecar, posttrain: of a post-training directory (docs/format.md): factors
                of the experts' gains, and the first one's router biases. Draft stages stay as they are.
            mem_budget_mb: refuse weights, and later sequences' states, that together take more than this.
            sessions: how many will be under way at once.

        Raises:
            UsageError: an option outside its choices.
            FileFormatError: the file, by name and place.
            CapacityError: weights over the budget or over the memory that is there.
            DeviceError: no driver, no compiler.
        """
        given = {
            "activations": activations, "kv": kv, "prefill": prefill, "index_keys": index_keys, "draft": draft
        }  # fmt: skip
        for key, value in given.items():
            if value not in CHOICES[key]:
                raise UsageError(f"{key} is {value!r}; choose one of {', '.join(CHOICES[key])}")
        if chunk < 1:
            raise UsageError(f"chunk is {chunk}; it must be at least 1")
        if draft_k is not None and draft_k < 0:
            raise UsageError(f"draft_k is {draft_k}; it must be at least 0")
        base = Base.open(path, engram_dir)
        mounted = None
        if zchain is not None or posttrain is not None:
            mounted = Mounted.open(base.config, zchain, posttrain)
        opened = device or Device.open()
        block = draft_block(base.config, dspark, dspark_block, draft_k)
        extra = (draft_bytes(base) if block else 0) + (mounted.stack.nbytes if mounted else 0)
        left = _check_memory(base, mem_budget_mb, opened, extra)
        tokenizer = Tokenizer.from_base(base.tokenizer_data(), base.config, str(base.path), base.folders)
        stores = []
        for g in range(len(base.config.engram_layer_ids)):
            table = base.engram_table(g)
            stores.append(RowStore(table.path, table.weight_offset, table.scale_offset, table.rows, table.head_dim))
        feed = NgramFeed(base.config, _tables(base), stores)
        dev = opened.with_constants(kernel_constants(base.config))
        bare = weights = place(base, dev, progress)
        if mounted is not None:
            weights = mount(bare, mounted, dev)
        options = SessionOptions(
            Numerics(activations, kv), prefill, index_keys, chunk, graphs, StateBudget(dev, left), draft
        )
        head = place_draft(base, dev, weights) if block else None
        return Engine(
            base, dev, tokenizer, weights, feed, options, Workspace(dev), head, block, draft_k, mounted, bare,
            sessions,
        )  # fmt: skip

    def session(self, policy: Callable[[], DraftPolicy] | None = None) -> Session:
        """A new, empty sequence; on the lane of one that is gone, if there is one.

        Args:
            policy: makes what decides about drafts, one a prompt; None: as the engine was opened.
        """
        config = replace(self.config, dspark_block_size=self.block) if self.draft is not None else self.config
        self._idle[:] = [
            lane for lane in self._idle if lane.weights is self.weights
        ]  # others are of before a remount
        del self._idle[self.sessions :]
        if self._idle:
            lane = self._idle.pop()
            lane.clear()
        else:
            lane = Lane(self.device, self.workspace, config, self.weights, self.feed, self.options, self.draft)
        session = Session(self.device, config, lane, policy or self._policy)
        weakref.finalize(session, _give_back, self._idle, lane).atexit = False
        return session

    def draw(self, asks: Sequence[Ask]) -> list[Exception | None]:
        """Sessions of this engine draw in one pass, where they need one (together.py); the `next` of each then
        returns without. What went wrong, ask by ask.
        """
        shared = self._together
        if shared is None or shared.weights is not self.weights or shared.options is not self.options:
            self._together = shared = Together(
                self.device, self.workspace, self.config, self.weights, self.feed, self.options, self._policy_among
            )  # fmt: skip
        return shared.draw(asks)

    def remount(self, zchain: str | Path | None, posttrain: str | Path | None) -> None:
        """Other sidecars from the next session on; sessions under way keep those that they began with. Base and
        graphs of the draft head stay where they are; what was mounted stays mounted if this fails.

        Raises:
            FileFormatError: as `open`.
            CapacityError: no memory for them.
        """
        assert self.bare is not None
        if zchain is None and posttrain is None:
            mounted, weights = None, self.bare
        else:
            mounted = Mounted.open(self.config, zchain, posttrain)
            weights = mount(self.bare, mounted, self.device)
        self.mounted, self.weights = mounted, weights
        self.drop_idle()

    def with_prefill(self, prefill: str) -> Engine:
        """The same placed model, as it is mounted now, with the other prefill: a ruler needs all rows' logits.
        Nothing is uploaded; a later `remount` of one is not the other's.
        """
        return replace(self, options=replace(self.options, prefill=prefill), _idle=[], _together=None)

    def drop_idle(self) -> None:
        """Give back the memory and the graphs of sequences that are gone."""
        self._idle.clear()
        self._together = None

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes of the device's memory in use, by anyone, and all of it; None: nobody can say."""
        free = free_bytes(self.device)
        return None if free is None else (self.device.info.memory - free, self.device.info.memory)

    def states(self) -> tuple[int, int | None]:
        """Bytes that the states of sequences hold, of those under way and of those that are kept for the next ones,
        and may hold; None: no limit but the memory that is there.
        """
        budget = self.options.budget
        return (0, None) if budget is None else (budget.held, budget.limit)

    def _policy(self) -> DraftPolicy:
        if self.draft is None:
            return PLAIN()
        return Scheduler(ledger=self._ledger) if self.draft_k is None else FixedDrafts(self.draft_k)

    def _policy_among(self, sessions: int, clock: Callable[[], float]) -> DraftPolicy:
        """What decides about a session's drafts in a pass of so many sessions."""
        if self.draft is None:
            return PLAIN()
        if self.draft_k is not None:
            return FixedDrafts(self.draft_k)
        ledger = self._ledgers.setdefault(sessions, DraftLedger())
        return Scheduler(clock, ledger, whole=True)  # every number of rows is another pass to capture

    def close(self) -> None:
        """Close the n-gram shards; device memory goes with the object."""
        self.feed.close()


def _give_back(idle: list[Lane], lane: Lane) -> None:
    """A session is gone. May run in any thread, hence nothing of the device here, nor is a lane dropped."""
    idle.append(lane)


def _tables(base: Base) -> EngramTables:
    t = base.engram_tensors()
    return EngramTables(t.token_map, t.multipliers, t.primes, t.offsets)


def draft_block(config: ModelConfig, dspark: bool, block: int | None, draft_k: int | None) -> int:
    """Drafts a round, 0 for plain decode.

    Raises:
        UsageError: a block or a number of drafts that the draft head does not make.
    """
    most = min(config.dspark_block_size, MAX_ROWS - 1) if config.num_nextn_predict_layers else 0
    if block is not None and not 1 <= block <= most:
        raise UsageError(f"dspark_block is {block}; this model drafts 1 to {most} tokens a round")
    drafts = most if block is None else block
    if draft_k is not None and draft_k > drafts:
        raise UsageError(f"draft_k is {draft_k}; a round has {drafts} drafts")
    return drafts if dspark and draft_k != 0 else 0


def _check_memory(base: Base, budget_mb: int | None, device: Device, extra: int) -> int | None:
    """Weights must fit before the first upload (other engines die minutes later); what the budget leaves for the
    sequences' states is returned, None without a budget.
    """
    need = placed_bytes(base) + extra
    if budget_mb is not None and need > budget_mb << 20:
        raise CapacityError(f"{base.path}: the weights take {need >> 20} MB, the budget is {budget_mb} MB")
    available = free_bytes(device)
    if available is not None and need > available:
        raise CapacityError(
            f"{base.path}: the weights take {need >> 20} MB, {available >> 20} MB of memory are available; "
            "free memory or use a smaller base"
        )
    return None if budget_mb is None else (budget_mb << 20) - need
