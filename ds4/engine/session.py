"""One timeline: callers say which tokens the sequence holds, the session works out what to compute.

`sync(tokens)` keeps the common prefix and runs the rest; `next(sampling)` draws the token after the timeline and
appends it; `step(tokens)` feeds known tokens through the decode kernels. A drawn token is run when its successor is
asked for, so the timeline may be one token ahead of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device
from ds4.engine.layer import Numerics
from ds4.engine.ngrams import NgramFeed
from ds4.engine.ops.kv import kv_layout
from ds4.engine.ops.sample import pack_params, sample
from ds4.engine.prefill import Cancelled, Prefill
from ds4.engine.sampling import Sampling
from ds4.engine.scratch import Workspace
from ds4.engine.state import SequenceState, Snapshot
from ds4.engine.step import MAX_ROWS, StepRunner, Tap
from ds4.engine.weights import ModelWeights
from ds4.errors import DeviceError, Ds4Error, RequestError
from ds4.model.config import ModelConfig


@dataclass(frozen=True)
class SessionSnapshot:
    """A timeline and its state on the host; `logits` f32 [V] of its last position, if they were known."""

    tokens: tuple[int, ...]
    state: Snapshot
    logits: NDArray[np.float32] | None


@dataclass(frozen=True)
class SessionOptions:
    """How a session computes; see Engine.open."""

    numerics: Numerics
    prefill: str
    index_keys: str
    chunk: int
    graphs: bool
    state_budget_bytes: int | None = None


class Session:
    """One sequence on the device. Not thread-safe: one thread owns the device."""

    def __init__(
        self, device: Device, ws: Workspace, config: ModelConfig, weights: ModelWeights, feed: NgramFeed,
        options: SessionOptions,
    ) -> None:  # fmt: skip
        self.device, self.config = device, config
        self.state = SequenceState(
            device, config, kv_layout(config, options.numerics.kv), budget_bytes=options.state_budget_bytes
        )
        self._step = StepRunner(
            device, ws, config, options.numerics, weights, self.state, feed,
            index_keys=options.index_keys, graphs=options.graphs,
        )  # fmt: skip
        self._prefill = Prefill(
            device, ws, config, options.numerics, weights, self.state, feed, options.prefill, options.chunk
        )
        self._one_by_one = options.index_keys == "released"
        self._last = device.empty((1, config.vocab_size), "f32")
        self._logits: Buffer | None = None  # of the state's last position
        self._sampled = device.zeros((1, 4), "i32")
        self._params = device.zeros((1, 8), "i32")
        self._sample_pos = device.zeros((1,), "i32")
        self.tokens: list[int] = []
        self.last_logprob = 0.0

    @property
    def position(self) -> int:
        """Tokens that the state holds; `tokens` may be one longer."""
        return self.state.position

    @property
    def counts(self) -> dict[str, int]:
        """Captures, replays and direct steps so far, and launches of a captured step."""
        return dict(vars(self._step.counts))

    def _check(self, tokens: Sequence[int], most: int) -> None:
        if len(tokens) == 0:
            raise RequestError("no tokens: a prompt needs at least one", "prompt")
        if len(tokens) > most:
            raise RequestError(
                f"{len(tokens)} tokens do not fit the context of {self.config.max_position_embeddings}",
                "prompt", "context_length_exceeded",
            )  # fmt: skip
        for i, token in enumerate(tokens):
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(f"token {i} is {token}; ids run from 0 to {self.config.vocab_size - 1}", "prompt")

    def sync(
        self,
        tokens: Sequence[int],
        *,
        logits: str = "last",
        chunk: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        tap: Tap | None = None,
    ) -> NDArray[np.float32] | None:
        """Make the timeline exactly `tokens`, by prefill.

        The longest common prefix is kept if the state can go back to it, else everything is run again. The last token
        is always run, so that its logits exist.

        Args:
            tokens: the whole sequence, at least one id.
            logits: "last" (for `next`), "none", or "all": then f32 [n, V] of the rows that this call ran is returned.
            chunk: positions a pass; any value gives the same bits.
            cancelled: asked before every chunk.

        Raises:
            RequestError: ids out of range, no ids, or more than the context.
            Cancelled: the timeline is then what was finished.
            Any other error leaves an empty timeline.
        """
        tokens = [int(t) for t in tokens]
        self._check(tokens, self.config.max_position_embeddings)
        keep = 0
        for held, wanted in zip(self.tokens[: self.position], tokens):
            if held != wanted:
                break
            keep += 1
        if keep == len(tokens) == self.position and logits == "last" and self._logits is not None:
            self.tokens = tokens
            return None
        keep = min(keep, len(tokens) - 1)
        if self.state.can_roll_back(keep):
            self._go_back(keep)
        else:
            self.state.clear()
            self._logits = None
        if chunk is not None:
            if chunk < 1:
                raise RequestError(f"chunk is {chunk}; it must be at least 1", "chunk")
            self._prefill.chunk = chunk
        bounded = self._prefill.extent(len(tokens)).bounded
        self.tokens = tokens
        start = self.position
        moved = self.state.reserve(len(tokens))
        if moved:
            self._step.forget_graphs()
        try:
            out = self._prefill.run(tokens, logits, self._last, on_progress, cancelled, tap)
        except Cancelled:  # asked between chunks: whole ones are kept, unless half of the layers are ahead
            if bounded:
                self.state.clear()
            self.tokens = tokens[: self.position]
            raise
        except BaseException:  # inside a chunk: some layers hold it and some do not
            self.state.clear()
            self.tokens = []
            raise
        self._published_by_prefill(start, len(tokens))
        if logits != "none":
            self._logits = self._last
        return out

    def _published_by_prefill(self, start: int, end: int) -> None:
        """After a prefill the published index keys are those of its last owner that closed a group in the last
        call.
        """
        for owner in self.config.kv_source_layer_ids:
            ratio = self.config.compress_ratios[owner]
            if end // ratio > start // ratio:
                self.state.published = owner

    def step(self, tokens: Sequence[int], *, logits: bool = True, tap: Tap | None = None) -> NDArray[np.float32]:
        """Append known tokens and run them through the decode kernels, up to 8 rows a pass.

        Returns:
            f32 [n, V], a row a token of this call (and of the drawn token before them, dropped), or [0, V] without
            logits.
        """
        tokens = [int(t) for t in tokens]
        self._check(tokens, self.config.max_position_embeddings - len(self.tokens))
        pending = len(self.tokens) - self.position
        self.tokens = self.tokens + tokens
        rows: list[NDArray[np.float32]] = []
        while self.position < len(self.tokens):
            count = min(1 if self._one_by_one else MAX_ROWS, len(self.tokens) - self.position)
            out = self._run_step(count, tap)
            if logits:
                rows.append(self.device.download(out))
        if not rows:
            return np.zeros((0, self.config.vocab_size), np.float32)
        return np.concatenate(rows)[pending:]

    def _run_step(self, count: int, tap: Tap | None = None) -> Buffer:
        self._logits = None
        out = self._step.run(self.tokens[: self.position + count], count, tap)
        V = self.config.vocab_size
        self._logits = out.view(4 * V * (count - 1), (1, V), "f32")
        return out

    def _current(self) -> Buffer:
        if not self.tokens:
            raise Ds4Error("the session holds no tokens: sync a prompt first")
        while self.position < len(self.tokens):
            self._run_step(min(1 if self._one_by_one else MAX_ROWS, len(self.tokens) - self.position))
        if self._logits is None:  # synced without logits, or rolled back: run the last position again
            self._go_back(self.position - 1)
            self._run_step(1)
        assert self._logits is not None
        return self._logits

    def logits(self) -> NDArray[np.float32]:
        """f32 [V] after the whole timeline."""
        out: NDArray[np.float32] = self.device.download(self._current())[0]
        return out

    def next(self, sampling: Sampling) -> int:
        """Draw the token after the timeline, append it, return it. `last_logprob` is its untempered log-probability.

        Raises:
            RequestError: the context is full (code context_length_exceeded).
            DeviceError: the logits hold NaN.
        """
        if len(self.tokens) >= self.config.max_position_embeddings:
            raise RequestError("the context is full", "messages", "context_length_exceeded")
        logits = self._current()
        self._params.write(
            pack_params(1, sampling.device_temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed)
        )
        self._sample_pos.write(np.array([self.position - 1], np.int32))
        sample(self.device, self._sampled, logits, self._params, self._sample_pos, 1)
        token, logprob, _kept, _ = self.device.download(self._sampled)[0]
        if token < 0:
            raise DeviceError(f"the logits after {self.position} tokens hold NaN or no finite value")
        self.last_logprob = float(np.int32(logprob).view(np.float32))
        self.tokens.append(int(token))
        return int(token)

    def snapshot(self) -> SessionSnapshot:
        """The timeline, copied to the host."""
        logits = None if self._logits is None else self.device.download(self._logits)[0]
        return SessionSnapshot(tuple(self.tokens), self.state.snapshot(), logits)

    def restore(self, snapshot: SessionSnapshot) -> None:
        """Continue from `snapshot` as if nothing had happened since."""
        if self.state.restore(snapshot.state):
            self._step.forget_graphs()
        self.tokens = list(snapshot.tokens)
        self._logits = None
        if snapshot.logits is not None:
            self._last.write(snapshot.logits.reshape(1, -1))
            self._logits = self._last

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on; exact, or refused (state.py)."""
        if position > len(self.tokens) or position < 1:
            raise Ds4Error(f"cannot roll back to {position}: the timeline holds {len(self.tokens)} tokens")
        if position < self.position:
            self._go_back(position)
        self.tokens = self.tokens[:position]

    def _go_back(self, position: int) -> None:
        """Roll the state back; the published index keys are again those of the last publisher before `position`."""
        self.state.rollback(position)
        self._logits = None
        self.state.published = None
        for p in range(max(0, position - max(self.config.compress_ratios)), position):
            self.state.published = self._step.last_publisher(p, self.state.published)

    def nbytes(self) -> int:
        """Device bytes of this sequence's state."""
        return self.state.nbytes()
