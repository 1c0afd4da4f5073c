"""What a model will take of a device's memory, before any of it is loaded.

The engine's own code runs on a device on paper (ds4/device/paper.py): weights are placed by their names and sizes,
sidecars mounted, sequences opened and grown to the context; then every kind of pass that a server runs goes over the
last positions, which grows the scratch as it will grow. So there is no second formula that could go stale.

Not counted, because the driver does not say before: its context, loaded kernels and the nodes of captured graphs, and
what it rounds allocations up by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ds4.base.blob import MATRICES, blob_bytes
from ds4.base.plan import expert_shapes
from ds4.base.types import VQBLOB
from ds4.device import DeviceInfo
from ds4.device.paper import PaperDevice
from ds4.engine.constraint import Anything
from ds4.engine.draft_weights import DraftWeights, place_stages
from ds4.engine.lane import Lane, SessionOptions
from ds4.engine.mount import Mounted, mount
from ds4.engine.ngrams import NgramFeed, Rows
from ds4.engine.ops.linear import Weight
from ds4.engine.ops.placement import plane_bytes
from ds4.engine.sampling import Penalties, Sampling
from ds4.engine.scheduler import FixedDrafts
from ds4.engine.scratch import Workspace
from ds4.engine.session import Session
from ds4.engine.state import SLACK
from ds4.engine.together import Ask, Together
from ds4.engine.weights import FORMATS, ModelWeights, Placer, kernel_constants, place_all
from ds4.engram.store import Ticket
from ds4.engram.tables import EngramTables
from ds4.errors import FileFormatError, UsageError
from ds4.model.config import ModelConfig

EACH = 3  # tokens by each kind of step: the first is drawn without a pass, the second's pass warms up, one captures
WARM_TOKENS = 40  # a server's first prompt (ds4.server.warm.warm_up): scratch grows from there


class TensorLike(Protocol):
    """A row of a base's table, or of its plan. `dims`: fastest first."""

    @property
    def type_id(self) -> int: ...
    @property
    def dims(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Estimate:
    """Bytes of device memory.

    Attributes:
        weights, sidecars, draft_head: as placed.
        state: what the sequences hold at the context.   steps: their logits, slots and what chooses tokens.
        scratch: temporaries of a pass, which the sequences share.
        peak: the most at any moment, above `total` where a sequence grows: it holds old rows and new ones then.
        launches: of one plain step, 0 without graphs.   context, sessions: what it was made for.
    """

    weights: int
    sidecars: int
    draft_head: int
    state: int
    steps: int
    scratch: int
    peak: int
    launches: int
    context: int
    sessions: int

    @property
    def total(self) -> int:
        """Bytes held when all sequences are at the context."""
        return self.weights + self.sidecars + self.draft_head + self.state + self.steps + self.scratch

    def parts(self) -> dict[str, int]:
        """The summands of `total`, by name."""
        names = ("weights", "sidecars", "draft_head", "state", "steps", "scratch")
        return {name: getattr(self, name) for name in names}


def estimate(
    config: ModelConfig,
    tensors: Mapping[str, TensorLike],
    info: DeviceInfo,
    options: SessionOptions,
    *,
    context: int,
    sessions: int = 1,
    block: int = 0,
    mounted: Mounted | None = None,
) -> Estimate:
    """The memory of `sessions` sequences of `context` tokens each.

    Args:
        tensors: the base's table by name; headers are enough.
        info: of the device that it is for.
        block: drafts a round; 0: no draft head is placed.
        mounted: checked sidecars.

    Raises:
        UsageError: a context that the model has not, or no session.
        FileFormatError: a tensor of a type that no kernel reads.
    """
    if not 1 <= context <= config.max_position_embeddings:
        raise UsageError(f"--context {context}: this model takes 1 to {config.max_position_embeddings} tokens")
    if sessions < 1:
        raise UsageError(f"--sessions {sessions}: must be at least 1")
    device = PaperDevice(info).with_constants(kernel_constants(config))
    memory, marks = device.context, [0]

    def grown() -> int:
        memory.sync()
        marks.append(memory.held)
        return marks[-1] - marks[-2]

    weights = place_all(_PaperPlacer(config, tensors, device))
    placed = grown()
    if mounted is not None:
        weights = mount(weights, mounted, device)
    sidecars = grown()
    head = None
    if block:
        head = place_stages(_PaperPlacer(config, tensors, device), weights.embed, weights.head)
    drafts = grown()
    seen = _Sequences(device, config, weights, head, replace(options, budget=None), block)
    held = [seen.run(context) for _ in range(sessions)]
    shared = seen.share(held)  # holds what shared passes need
    sequences = grown()
    state, scratch = sum(session.nbytes() for session in held), seen.scratch.nbytes()
    del shared
    return Estimate(
        weights=placed, sidecars=sidecars, draft_head=drafts, state=state, steps=sequences - state - scratch,
        scratch=scratch, peak=memory.peak, launches=seen.launches, context=context, sessions=sessions,
    )  # fmt: skip


class _Sequences:
    """Sequences on paper, on one scratch, as an engine's are."""

    def __init__(
        self, device: PaperDevice, config: ModelConfig, weights: ModelWeights, draft: DraftWeights | None,
        options: SessionOptions, block: int,
    ) -> None:  # fmt: skip
        self.device, self.weights, self.draft, self.options, self.block = device, weights, draft, options, block
        self.config = replace(config, dspark_block_size=block) if block else config
        self.scratch, self.feed = Workspace(device), _PaperFeed(config)
        self.launches = 0

    def share(self, sessions: Sequence[Session]) -> Together:
        """Passes that the sequences share, as many at a time as do."""
        made = Together(
            self.device, self.scratch, self.config, self.weights, cast("NgramFeed", self.feed), self.options,
            lambda sessions, clock: FixedDrafts(self.block),
        )  # fmt: skip
        plain = Sampling(temperature=1.0, top_p=0.9, seeded=False)
        for session in sessions:
            session.rollback(max(1, len(session.tokens) - EACH - 1))
            session.next(plain)
        for _ in range(EACH):
            made.draw([Ask(session, plain) for session in sessions])
            for session in sessions:
                if len(session.tokens) < self.config.max_position_embeddings:
                    session.next(plain)
        return made

    def run(self, context: int) -> Session:
        """One sequence to `context` tokens: the first prompt, then the last chunks of a long one, then every kind of
        step, penalised and with the likeliest tokens told, and one under a mask.
        """
        c = self.config
        lane = Lane(
            self.device, self.scratch, c, self.weights, cast("NgramFeed", self.feed), self.options, self.draft
        )
        session = Session(self.device, c, lane)
        answer = 2 * (self.block + 1) * EACH + self.block
        self._decode(session, min(WARM_TOKENS, context), min(WARM_TOKENS + answer, context))
        reach = 2 * lane.prefill.chunk + c.sliding_window + SLACK + answer  # beyond that every chunk is as these
        lane.clear()
        lane.state.reserve(max(1, context // 2))  # a conversation that grows to the context holds half of it before
        session.tokens = [c.bos_token_id] * max(0, context - reach)
        lane.state.advance(len(session.tokens))
        self._decode(session, max(1, context - answer), context)
        lane.state.reserve(context)
        return session

    def _decode(self, session: Session, prompt: int, length: int) -> None:
        """A prompt, and an answer that ends at `length` tokens or before."""
        plain = Sampling(temperature=1.0, top_p=0.9, seeded=False)
        penalised = replace(plain, penalties=Penalties(presence=0.1), top=1)
        session.sync([self.config.bos_token_id] * prompt)
        for sampling in (plain, penalised):
            for k in range(self.block + 1):
                session.policy = FixedDrafts(k)
                for _ in range(EACH):
                    if len(session.tokens) < length:
                        session.next(sampling, left=length - len(session.tokens))
                if k == 0 and sampling is plain:
                    self.launches = max(self.launches, session.counts["launches"])  # 0: captured before
        session.constrain(Anything(self.config.vocab_size))
        if len(session.tokens) < length:
            session.next(plain, left=1)
        session.constrain(None)


class _PaperPlacer(Placer):
    """Weights by their names and sizes."""

    def __init__(self, config: ModelConfig, table: Mapping[str, TensorLike], device: PaperDevice) -> None:
        super().__init__(_PaperTensors(config, table), config, device)
        self._table = table

    def matrix(self, name: str) -> Weight:
        info = self._table[name]
        form = FORMATS.get(info.type_id)
        if form is None or len(info.dims) != 2:
            raise FileFormatError(f"tensor {name} has type id {info.type_id} and dims {info.dims}: no matrix")
        cols, rows = info.dims
        codes_bytes, scales_bytes = plane_bytes(form, rows, cols)
        codes = self.device.empty((codes_bytes,), "u8")
        scales = self.device.empty((scales_bytes,), "u8") if scales_bytes else codes
        return Weight(form, rows, cols, codes, scales)


class _PaperTensors:
    """`Tensors` without values. Matrices never come from here: `_PaperPlacer.matrix` needs no bytes."""

    def __init__(self, config: ModelConfig, table: Mapping[str, TensorLike]) -> None:
        self._config, self._table = config, table

    def vector(self, name: str) -> NDArray[np.float32]:
        return np.zeros(tuple(reversed(self._table[name].dims)), np.float32)

    def matrix(self, name: str) -> tuple[str, NDArray[np.uint8], int, int]:
        raise AssertionError(name)

    def experts(self, prefix: str) -> _PaperBlob:
        c = self._config
        n_expert = c.dspark_n_routed_experts if prefix.startswith("mtp.") else c.n_routed_experts
        info = self._table[f"{prefix}.ffn_exps_vq.blob"]
        if info.type_id != VQBLOB:
            raise FileFormatError(f"tensor {prefix}.ffn_exps_vq.blob has type id {info.type_id}, not {VQBLOB}")
        wide = info.nbytes > blob_bytes(expert_shapes(c), n_expert, 4096)
        return _PaperBlob(expert_shapes(c), 8192 if wide else 4096)


@dataclass(frozen=True)
class _PaperPayload:
    main: NDArray[np.uint8]
    plane: NDArray[np.uint8] | None
    gains: NDArray[np.float32]


class _PaperBlob:
    """A layer's experts: every one is the same nothing."""

    def __init__(self, shapes: Sequence[tuple[int, int]], n_codes: int) -> None:
        self.codebook = np.zeros((n_codes, 8), np.uint8)
        self._payloads = [
            _PaperPayload(
                np.zeros(rows * -(-(cols // 8) * 12 // 8), np.uint8),
                np.zeros(rows * -(-(cols // 8) // 8), np.uint8) if n_codes > 4096 else None,
                np.zeros(rows, np.float32),
            )
            for rows, cols in shapes
        ]
        assert len(self._payloads) == len(MATRICES)

    def payload(self, expert: int, matrix: int) -> _PaperPayload:
        return self._payloads[matrix]


class _PaperTicket:
    """Rows that are there, and zero."""

    done = True

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def wait(self) -> NDArray[np.uint8]:
        return np.zeros(self._nbytes, np.uint8)


class _PaperFeed(NgramFeed):
    """N-gram rows without shards and without a history."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, cast("EngramTables", None), ())

    def _zeros(self, slots: Iterator[int], count: int) -> dict[int, Any]:
        nbytes = count * self.config.engram_columns * self.row_bytes
        return {g: _PaperTicket(nbytes) for g in slots}

    def read(self, tokens: Sequence[int], start: int, count: int, slots: Sequence[int]) -> dict[int, Ticket]:
        return self._zeros(iter(slots), count)

    def request(self, tokens: Sequence[int], start: int, count: int) -> dict[int, Rows]:
        tickets = self._zeros(iter(range(len(self.config.engram_layer_ids))), count)
        return {g: Rows([ticket], self.counts) for g, ticket in tickets.items()}
