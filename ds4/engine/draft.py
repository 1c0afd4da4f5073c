"""The draft head of one sequence on the device (dspark.md): keys of committed positions, and one round of drafts.

A round is embedding, the stages on the block's rows (the backbone's own block functions, with another attention),
head, and the pass from draft to draft. Nothing of it goes through the host: the token that it starts from, drafts,
logits and confidences are device buffers, and positions are device slots that are written before the launches, so a
round is captured and replayed. The first one runs its launches directly, which grows the scratch; the second is
captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ds4.device import Buffer, Device, Graph
from ds4.device.kernels.linear import ROWS
from ds4.engine.draft_state import DraftState
from ds4.engine.draft_weights import DraftWeights
from ds4.engine.layer import Numerics, Pass, _mix, attention_input, begin, feed_forward, head
from ds4.engine.ops.draft import draft_argmax, draft_attention, draft_bias, draft_confidence
from ds4.engine.ops.embed import embed
from ds4.engine.ops.hyper import expand
from ds4.engine.ops.kv import window_commit, window_kv
from ds4.engine.ops.linear import linear
from ds4.engine.ops.norm import rms_norm
from ds4.engine.ops.rope import rope_query
from ds4.engine.ops.sample import penalize, sample
from ds4.engine.scratch import Workspace
from ds4.engine.state import SLACK, SequenceState
from ds4.engine.weights import LayerWeights
from ds4.errors import Ds4Error, UsageError
from ds4.model.config import ModelConfig


@dataclass(frozen=True)
class Penalized:
    """What penalties read (ops.sample.penalize): counts u32 [V], settings f32 [4], biases f32 [V]."""

    seen: Buffer
    values: Buffer
    bias: Buffer


class Drafter:
    """Draft stages of one sequence. B is the block: drafts a round.

    Attributes:
        state: rings and main rows; its position is that of the token that a round starts from.
        told: i32 [1 + 2 B], `tokens` and `confidence` in one piece, for one download.
        tokens: i32 [1 + B], the token that the last round started from, then its drafts.
        drafts: i32 [B], a view of them: draft i is for the position after `position + i`.
        logits: f32 [B, V], of each draft, without penalties.
        confidence: f32 [B], raw: its sigmoid is the chance that a draft is accepted if those before it are.
        rounds, commits: of drafts, and of keys, so far.   captures: graphs captured.   cold: runs that were the first
            of their kind or captured a graph.
    """

    def __init__(
        self, device: Device, ws: Workspace, config: ModelConfig, numerics: Numerics, weights: DraftWeights,
        sequence: SequenceState, *, graphs: bool, touched: Buffer | None = None,
    ) -> None:  # fmt: skip
        """Args:
            config: the model's; a smaller dspark_block_size drafts smaller blocks.
            sequence: the backbone's state, whose row format the rings share.
            touched: u32 [layers and stages], see Pass.

        Raises:
            UsageError: a block of more rows than a decode pass has.
        """
        B, S = config.dspark_block_size, config.hc_mult
        if not 1 <= B <= ROWS:
            raise UsageError(f"the draft block is {B}; the kernels take 1 to {ROWS} rows")
        self.device, self.ws, self.numerics, self.weights = device, ws, numerics, weights
        # the block functions read sizes from the pass's config: the stages' experts are counted otherwise
        self.config = replace(
            config, n_routed_experts=config.dspark_n_routed_experts,
            num_experts_per_tok=config.dspark_num_experts_per_tok,
        )  # fmt: skip
        self.graphs = graphs
        self.state = DraftState(device, config, sequence.layout, numerics.act)
        self.B = B
        self.told = device.zeros((1 + 2 * B,), "i32")
        self.tokens = self.told.view(0, (1 + B,))
        self.drafts = self.tokens.view(4, (B,))
        self.logits = device.empty((B, config.vocab_size), "f32")
        self.confidence = self.told.view(4 * (1 + B), (B,), "f32")
        self._params = device.zeros((1, 8), "i32")
        self._picked = device.zeros((1, 4), "i32")
        self._draws = False
        self._penalized: Penalized | None = None
        self._left: Buffer | None = None  # logits f32 [B, V] as penalties leave them, once somebody is penalised
        self._ids = device.upload(np.full(B, config.dspark_noise_token_id, np.int32))
        self._pos = device.zeros((B,), "i32")
        self._ends = device.zeros((B + 1,), "i32")
        self._commit_pos = device.zeros((ROWS,), "i32")
        self._one_hot = device.upload(np.tile(np.eye(1, S, dtype=np.float32), (B, 1)))
        self._markov = device.empty((B, 1, config.dspark_markov_rank), "f32")
        x = device.empty((B, S, config.hidden_size), "f32")
        pre = device.empty((B, S), "f32")
        self._pass = Pass(
            device, ws, self.config, numerics, "step", sequence, B, x, pre, self._pos, (), {}, None, touched
        )
        self._graphs: dict[str, Graph | None] = {}  # None: run once, directly
        self._generation = ws.generation
        self.forget_counts()

    # -- keys of committed positions (dspark 4, 5, 6.1)

    def commit(self, count: int) -> None:
        """The first `count` pending main rows are committed: their keys go into the rings.

        Raises:
            Ds4Error: fewer rows are pending, or keys of their positions stand already.
        """
        if not 1 <= count <= self.state.pending:
            raise Ds4Error(f"{count} draft rows to commit, {self.state.pending} are pending")
        start = self.state.start
        self.commits += 1
        self.state.begin(start)
        self._commit_pos.write(np.arange(start, start + count, dtype=np.int32))
        self._run(f"commit {count}", lambda: self._write_keys(self.state.main, self._commit_pos, "step", count))
        self.state.end(start + count)

    def seed(self, main: Buffer, start: int, end: int) -> None:
        """Keys of a prefill's rows, chunk by chunk in rising order.

        Args:
            main: A [R, targets * D], main-hidden rows of positions start .. start + R - 1.
            end: where the prefill will end; rows that no window can reach from there are passed over.

        Raises:
            Ds4Error: keys of these positions stand already.
        """
        rows, width = main.shape
        stop = start + rows
        first = max(start, end - self.config.sliding_window - SLACK)
        if first >= stop:
            return
        self.state.begin(first)
        count = stop - first
        pos = self.ws.get("draft_seed_pos", (count,), "i32")
        pos.write(np.arange(first, stop, dtype=np.int32))
        item = 4 if main.dtype == "f32" else 2
        self._write_keys(main.view((first - start) * width * item, (count, width)), pos, "prefill", count)
        self.state.end(stop)

    def _write_keys(self, main: Buffer, pos: Buffer, family: str, R: int) -> None:
        c, dev, ws, w, act = self.config, self.device, self.ws, self.weights, self.numerics.act
        y = ws.get("draft_main", (R, c.hidden_size), act)
        linear(dev, ws, family, w.main_proj, y, main, R)
        rms_norm(dev, y, y, w.main_norm, R, c.hidden_size, c.rms_norm_eps)
        for ring, lw in zip(self.state.rings, w.model.layers):
            kv = ws.get("kv", (R, c.head_dim), act)
            linear(dev, ws, family, lw.kv, kv, y, R)
            chunk = ws.get("window_chunk", self.state.layout.window_shape(R), self.state.layout.dtype)
            window_kv(dev, chunk, kv, lw.kv_norm, pos, lw.freq, R, c.rms_norm_eps)
            window_commit(dev, ring, chunk, pos, R)

    # -- a round (dspark 6)

    def pick_by(self, params: NDArray[np.int32] | None, penalized: Penalized | None = None) -> None:
        """How the drafts of later rounds are picked: the likeliest one, or drawn by `params` i32 [1, 8] (ops.sample)
        at the positions before theirs; from the logits, or from what penalties leave of them. A draft counts those
        before it.
        """
        self._draws = params is not None
        if params is not None:
            self._params.write(params)
        if penalized is not None and self._left is None:
            self._left = self.device.empty(self.logits.shape, "f32")
        self._penalized = penalized

    @property
    def picked_from(self) -> Buffer:
        """f32 [B, V], the very numbers that the drafts of the last round were picked by."""
        return self.logits if self._penalized is None or self._left is None else self._left

    def draft(self, token: Buffer) -> None:
        """One round after `token` i32 [1], the main model's choice for the first position it has not seen: the
        state's. Fills `tokens`, `logits` and `confidence`; pending main rows are not looked at.

        Raises:
            Ds4Error: no position is committed.
        """
        at, B = self.state.position, self.B
        if at < 1:
            raise Ds4Error("drafting needs a committed position: seed or commit first")
        self._pos.write(np.arange(at, at + B, dtype=np.int32))
        self._ends.write(np.array([at] + [at + B - 1] * B, np.int32))
        self.device.copy(self.tokens, token, 4)
        self.rounds += 1
        self._run(f"round {self._draws} {self._penalized is not None}", self._round)

    def _round(self) -> None:
        p, dev, model = self._pass, self.device, self.weights.model
        dev.copy(self._ids, self.tokens, 4)
        begin(p, model, self._ids, self._one_hot)
        for ring, lw in zip(self.state.rings, model.layers):
            self._attend(ring, lw, attention_input(p, lw))
            feed_forward(p, lw)
        head(p, model, self.logits, 0, self.B)
        self._draft_by_draft()
        draft_confidence(dev, self.confidence, self.weights.confidence, p.x, p.pre, self._markov, self.B)

    def _attend(self, ring: Buffer, lw: LayerWeights, y: Buffer) -> None:
        """As layer.attend without compressed rows; the block's rows all see the ring and each other, none leaves a
        key.
        """
        p, c, dev, ws, B = self._pass, self.config, self.device, self.ws, self.B
        H, K, layout = c.num_attention_heads, c.head_dim, self.state.layout
        queries = p.temp("q", B + 1, H, K)  # draft_attention wants a row before the block's
        q = queries.view(queries.nbytes // (B + 1), (B, H, K))
        chunk = ws.get("window_chunk", layout.window_shape(B + 1), layout.dtype)

        def keys() -> None:
            kv = p.temp("kv", B, K)
            linear(dev, ws, "step", lw.kv, kv, y, B)
            window_kv(dev, chunk, kv, lw.kv_norm, p.pos, lw.freq, B, c.rms_norm_eps)

        with p.beside(keys):
            qa, qr = p.temp("q_a", B, c.q_lora_rank), p.temp("q_r", B, c.q_lora_rank)
            linear(dev, ws, "step", lw.q_a, qa, y, B)
            rms_norm(dev, qr, qa, lw.q_a_norm, B, c.q_lora_rank, c.rms_norm_eps)
            linear(dev, ws, "step", lw.q_b, q, qr, B)
            rope_query(dev, q, p.pos, lw.freq, B)
        out = p.temp("attn_out", B, H, K)
        draft_attention(
            dev, ws, out, queries, ring, chunk, lw.sinks, p.pos, self._ends, lw.freq, self.state.first_slot, B,
            window=c.sliding_window,
        )  # fmt: skip
        u, back = p.temp("attn_u", B, c.o_groups * c.o_lora_rank), p.temp("block_out", B, c.hidden_size)
        linear(dev, ws, "step", lw.out_a, u, out, B, groups=c.o_groups)
        linear(dev, ws, "step", lw.out_b, back, u, B)
        expand(dev, p.x, back, *_mix(p, "attn"), B)

    def _draft_by_draft(self) -> None:
        """Each row's logits get a bias from the token before it, then give the next token; ties: lowest id."""
        dev, w, V, rank = self.device, self.weights, self.config.vocab_size, self.config.dspark_markov_rank
        bias = self.ws.get("draft_bias", (1, V), "f32")
        for i in range(self.B):
            e = self._markov.view(4 * i * rank, (1, 1, rank))
            embed(dev, w.markov_embed, e, self.tokens.view(4 * i, (1,)), 1, 1)
            linear(dev, self.ws, "step", w.markov_head, bias, e.reshape(1, rank), 1)
            row = self.logits.view(4 * i * V, (1, V))
            draft_bias(dev, row, bias)
            token = self.tokens.view(4 * (i + 1), (1,))
            if self._penalized is not None:
                p, unbiased, row = self._penalized, row, self.picked_from.view(4 * i * V, (1, V))
                before = self.drafts.view(0, (i,)) if i else None
                penalize(dev, row, unbiased, p.seen, p.values, 1, pending=before, bias=p.bias, first=i)
            if self._draws:
                sample(dev, self._picked, row, self._params, self._pos.view(4 * i, (1,)), 1, tokens=token)
            else:
                draft_argmax(dev, token, row)

    def forget_counts(self) -> None:
        """Count from zero."""
        self.captures = self.cold = self.rounds = self.commits = 0

    # -- graphs

    def _run(self, kind: str, launches: Callable[[], None]) -> None:
        """Directly the first time, captured the second, replayed from then on; scratch that grew: captured again."""
        self.ws.passes += 1
        if self.ws.generation != self._generation:  # captured launches hold addresses that have moved
            self._graphs = dict.fromkeys(self._graphs)
            self._generation = self.ws.generation
        graph = self._graphs.get(kind)
        if graph is None and kind in self._graphs and self.graphs:
            with self.device.capture() as graph:
                launches()
            self._graphs[kind] = graph
            self.captures += 1
            self.cold += 1
        if graph is not None:
            graph.replay()
            return
        self.cold += kind not in self._graphs
        launches()
        self._graphs[kind] = None
