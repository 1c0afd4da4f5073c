"""The layer, once: `step.py` and `prefill.py` both call it, and nothing else computes anything of the model.

Order and words are model-text section 5. A `Pass` is one call's rows: where they stand, which kernel family runs
them, and the buffers that live from layer to layer. Temporaries come from the workspace by name and are gone after
the layer. In a step two branches of a layer run beside the rest of it (`Pass.beside`): keys and values beside the
queries, the shared expert beside the routed ones; each takes its site's mixes along, which nobody wants before the
way back into the streams. Neither side writes a buffer that the other names.

The rows of a step may belong to several sequences (`Part`). Whatever a row alone decides is launched once for all of
them; what reads or writes a sequence's caches is launched for each part, as it would be for that sequence alone, so a
row's bits do not depend on its neighbours.

Dtypes at the boundaries: streams f32; block inputs and outputs A (bf16, or f32 in comparison mode); router and index
logits, compressor inputs f32; softmax, norms, Sinkhorn and accumulation f32 inside the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ds4.device import Buffer, Device
from ds4.engine.ops.attention import attention
from ds4.engine.ops.compress import compress_commit, compress_pool, compress_store, index_keys
from ds4.engine.ops.draft import draft_tap
from ds4.engine.ops.embed import embed
from ds4.engine.ops.engram import engram_decode, engram_gate
from ds4.engine.ops.experts import experts, moe_sum, swiglu
from ds4.engine.ops.hyper import collapse_norm, expand, mixes
from ds4.engine.ops.index import index_query, index_select, mask_words
from ds4.engine.ops.kv import window_commit, window_kv
from ds4.engine.ops.linear import linear
from ds4.engine.ops.norm import rms_norm
from ds4.engine.ops.rope import rope_query
from ds4.engine.ops.router import route
from ds4.engine.scratch import Workspace
from ds4.engine.state import SequenceState
from ds4.engine.weights import LayerWeights, ModelWeights
from ds4.model.config import ModelConfig


@dataclass(frozen=True)
class Numerics:
    """What a pass rounds: `act` "bf16" or "f32" between blocks, `kv` "fp4" (as stored) or "f32"."""

    act: str = "bf16"
    kv: str = "fp4"


@dataclass(frozen=True)
class MoeBuffers:
    """What a layer's router and experts did with the rows of a pass: scratch, which the next layer writes over.

    logits f32 [R, E]; chosen i32 [R, k] and weights f32 [R, k], by falling selection score; slots f32 [R, k, D], what
    each chosen expert adds, its weight inside; shared A [R, D]; out A [R, D], their sum; post f32 [R, S], by which it
    enters the streams; pre f32 [R, S], what comes next collapses them with.
    """

    layer: int
    logits: Buffer
    chosen: Buffer
    weights: Buffer
    slots: Buffer
    shared: Buffer
    out: Buffer
    post: Buffer
    pre: Buffer


MoeTap = Callable[[MoeBuffers], None]


@dataclass(frozen=True)
class Part:
    """Consecutive positions of one sequence among the rows of a pass: rows first .. first + R - 1.

    published: index source -> owner whose keys it scores, where that is not its own. main_hidden A [R, targets * D]
    is filled with what the draft head reads of these rows, where one is given.
    """

    state: SequenceState
    first: int
    R: int
    published: dict[int, int]
    main_hidden: Buffer | None = None
    index: int = 0  # among the parts

    def rows(self, buffer: Buffer) -> Buffer:
        """The part's rows of a buffer that has a row a row of the pass."""
        rows = buffer.shape[0]
        if rows == self.R:
            return buffer
        return buffer.view(buffer.nbytes // rows * self.first, (self.R, *buffer.shape[1:]), buffer.dtype)


@dataclass
class Pass:
    """R rows on their way through the layers: consecutive positions of one sequence, or the parts of several.

    x f32 [R, S, D], pre f32 [R, S] (what the next block collapses with), pos i32 [R], ids i32 [R]; engram rows u8
    [R, columns, row bytes] a slot; picks i32 [R, topk] and the candidate mask live from an index source to the next.
    main_hidden A [R, targets * D] is filled with what the draft head reads of these rows, where one is given. touched
    u32 [layers]: a step of several rows adds the distinct experts that they picked. moe_tap sees each layer's
    experts. several: the parts, where there are more than one; state, published and main_hidden are then the first
    one's.
    """

    device: Device
    ws: Workspace
    config: ModelConfig
    numerics: Numerics
    family: str  # "step" or "prefill"
    state: SequenceState
    R: int
    x: Buffer
    pre: Buffer
    pos: Buffer
    engram_rows: tuple[Buffer, ...]
    published: dict[int, int]  # index source -> owner whose keys it scores, where that is not its own
    main_hidden: Buffer | None = None
    touched: Buffer | None = None
    moe_tap: MoeTap | None = None
    several: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sequences of the rows, in order."""
        return self.several or (Part(self.state, 0, self.R, self.published, self.main_hidden),)

    def temp(self, name: str, *shape: int, dtype: str | None = None) -> Buffer:
        """Scratch of the activation dtype unless said otherwise."""
        return self.ws.get(name, shape, dtype or self.numerics.act)

    @contextlib.contextmanager
    def beside(self, work: Callable[[], None]) -> Iterator[None]:
        """`work()` beside the block in a step, whose launches are too small to fill the device; else before it."""
        if self.family == "step":
            with self.device.beside(work):
                yield
        else:
            work()
            yield

    @property
    def window_chunk(self) -> Buffer:
        return self.ws.get("window_chunk", self.state.layout.window_shape(self.R), self.state.layout.dtype)

    @property
    def picks(self) -> Buffer:
        return self.ws.get("picks", (self.R, self.config.index_topk), "i32")

    def mask(self, part: Part) -> Buffer:
        """The candidate mask of a part; it lives from the layer that makes it to the last one that uses it."""
        rows = -(-part.state.capacity // max(1, self.config.compress_ratios[self.config.candidate_source_layer_id]))
        shape = part.R, mask_words(rows, self.config.candidate_block_size)
        return self.ws.part(part.index).get("candidates", shape, "u32")

    def each(self, work: Callable[[Part, Workspace], None]) -> None:
        """`work(part, its scratch)` for every part, beside each other: one sequence's launches are too small to fill
        the device.
        """
        self._each(self.parts, work)

    def _each(self, parts: Sequence[Part], work: Callable[[Part, Workspace], None]) -> None:
        part, others = parts[0], parts[1:]
        if not others:
            work(part, self.ws.part(part.index))
            return
        with self.device.beside(lambda: self._each(others, work)):
            work(part, self.ws.part(part.index))


def begin(p: Pass, w: ModelWeights, ids: Buffer, one_hot: Buffer) -> None:
    """Embed the ids into every stream; the first block collapses with (1, 0, 0, ...)."""
    embed(p.device, w.embed, p.x, ids, p.R, p.config.hc_mult)
    p.device.copy(p.pre, one_hot, 4 * p.R * p.config.hc_mult)


def apply_engram(p: Pass, lw: LayerWeights) -> None:
    """Add the n-gram value to every stream through its gate (model-text 9.3)."""
    if lw.engram is None:
        return
    c, dev = p.config, p.device
    slot = c.engram_slot(lw.layer)
    assert slot is not None
    e = p.temp("engram_e", p.R, c.engram_columns * c.engram_head_dim)
    engram_decode(dev, e, p.engram_rows[slot], p.R)
    kv = p.temp("engram_kv", p.R, (c.hc_mult + 1) * c.hidden_size, dtype="f32")
    linear(dev, p.ws, p.family, lw.engram.wkv, kv, e, p.R)
    engram_gate(dev, p.x, kv, lw.engram.q, lw.engram.k, p.R, c.rms_norm_eps, None)


def _mix(p: Pass, name: str) -> tuple[Buffer, Buffer]:
    S = p.config.hc_mult
    return p.temp(f"{name}_post", p.R, S, dtype="f32"), p.temp(f"{name}_comb", p.R, S, S, dtype="f32")


def _attn_pre(p: Pass) -> Buffer:
    return p.temp("attn_pre", p.R, p.config.hc_mult, dtype="f32")


def _attention_mixes(p: Pass, lw: LayerWeights) -> None:
    """From the streams as attention finds them: how it goes back into them, and what the FFN collapses with."""
    mixes(p.device, p.ws, lw.hyper_attn, p.x, _attn_pre(p), *_mix(p, "attn"), p.R)


def _block_input(p: Pass, pre: Buffer, norm: Buffer) -> Buffer:
    """A block's normed input A [R, D]: the streams, collapsed with `pre`."""
    y = p.temp("block_in", p.R, p.config.hidden_size)
    collapse_norm(p.device, y, p.x, pre, norm, p.R, p.config.rms_norm_eps)
    return y


def attention_input(p: Pass, lw: LayerWeights) -> Buffer:
    """Attention's mixes from the streams as they are, then its normed input A [R, D]."""
    _attention_mixes(p, lw)
    return _block_input(p, p.pre, lw.attn_norm)


def publish(p: Pass, lw: LayerWeights, y: Buffer) -> None:
    """A kv source's part for all rows: close groups, store compressed rows and index keys (model-text 5.5, 5.6)."""
    comp = lw.compressor
    if comp is None:
        return
    c, dev, R = p.config, p.device, p.R
    a = p.temp("compress_a", R, c.head_dim, dtype="f32")
    linear(dev, p.ws, p.family, comp.kv, a, y, R)
    g = None
    if comp.gate is not None:
        g = p.temp("compress_g", R, c.head_dim, dtype="f32")
        linear(dev, p.ws, p.family, comp.gate, g, y, R)
    lat = p.temp("latent", R, c.head_dim)

    def pool(part: Part, _: Workspace) -> None:
        rows, pos = part.state.sources[lw.layer], part.rows(p.pos)
        gate = None if g is None else part.rows(g)
        compress_pool(
            dev, part.rows(lat), part.rows(a), gate, rows.partial, comp.norm, pos, part.R, lw.ratio, c.rms_norm_eps
        )  # fmt: skip
        if rows.partial is not None and gate is not None:
            compress_commit(dev, rows.partial, part.rows(a), gate, pos, part.R)

    p.each(pool)
    key = p.temp("index_key", R, c.index_head_dim, dtype="f32")
    linear(dev, p.ws, p.family, comp.index_key, key, lat, R)

    def store(part: Part, _: Workspace) -> None:
        rows, pos = part.state.sources[lw.layer], part.rows(p.pos)
        index_keys(
            dev, rows.keys, part.rows(key), comp.index_key_norm, pos, lw.freq, part.R, lw.ratio, c.rms_norm_eps
        )  # fmt: skip
        compress_store(dev, rows.comp, part.rows(lat), pos, lw.freq, part.R, lw.ratio)

    p.each(store)


def _index_query(p: Pass, lw: LayerWeights, y: Buffer, qr: Buffer) -> tuple[Buffer, Buffer]:
    """An index source's queries and head weights, f32 [R, Hi, I] and [R, Hi]."""
    c, dev, R = p.config, p.device, p.R
    assert lw.indexer is not None
    q = p.temp("index_q", R, c.index_n_heads, c.index_head_dim, dtype="f32")
    linear(dev, p.ws, p.family, lw.indexer.query, q, qr, R)
    index_query(dev, q, p.pos, lw.freq, R, p.numerics.kv)
    w = p.temp("index_w", R, c.index_n_heads, dtype="f32")
    linear(dev, p.ws, p.family, lw.indexer.weights, w, y, R)
    return q, w


def _select(p: Pass, part: Part, ws: Workspace, lw: LayerWeights, q: Buffer, w: Buffer) -> None:
    """An index source's picks for every row of a part (model-text 5.6); later layers reuse them."""
    c = p.config
    owner = c.kv_owner(lw.layer)
    assert owner is not None
    candidates = None
    if lw.layer == c.candidate_source_layer_id:
        candidates = ("make", p.mask(part))
    elif c.uses_candidates(lw.layer):
        candidates = ("use", p.mask(part))
    keys = part.state.sources[part.published.get(lw.layer, owner)].keys
    factor = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
    index_select(
        p.device, ws, p.family, part.rows(p.picks), part.rows(q), part.rows(w), keys, part.rows(p.pos), part.R,
        ratio=lw.ratio, capacity=-(-part.state.capacity // lw.ratio), factor=factor, candidates=candidates,
        block_size=c.candidate_block_size, topk_blocks=c.candidate_topk_blocks,
    )  # fmt: skip


def _window_rows(p: Pass, lw: LayerWeights, y: Buffer) -> None:
    """Fill `window_chunk`, from which attention reads the rows' own keys."""
    c, dev, R = p.config, p.device, p.R
    kv = p.temp("kv", R, c.head_dim)
    linear(dev, p.ws, p.family, lw.kv, kv, y, R)
    window_kv(dev, p.window_chunk, kv, lw.kv_norm, p.pos, lw.freq, R, c.rms_norm_eps)


def _queries(p: Pass, lw: LayerWeights, y: Buffer) -> tuple[Buffer, Buffer]:
    """Queries A [R, H, K] and the normed vector that they come from, A [R, q_lora_rank]."""
    c, dev, R = p.config, p.device, p.R
    qa = p.temp("q_a", R, c.q_lora_rank)
    linear(dev, p.ws, p.family, lw.q_a, qa, y, R)
    qr = p.temp("q_r", R, c.q_lora_rank)
    rms_norm(dev, qr, qa, lw.q_a_norm, R, c.q_lora_rank, c.rms_norm_eps)
    q = p.temp("q", R, c.num_attention_heads, c.head_dim)
    linear(dev, p.ws, p.family, lw.q_b, q, qr, R)
    rope_query(dev, q, p.pos, lw.freq, R)
    return q, qr


def attend(p: Pass, lw: LayerWeights, y: Buffer, *, whole: bool = False) -> None:
    """Attention of the rows and its way back into the streams (model-text 5.4). `whole`: with the mixes and the rows'
    publishing; else these are done already.

    The streams as they enter it, after the engram, are the draft head's tap (dspark 3): here, and not in `run_layer`,
    because a bounded replay enters its split layer here.
    """
    c, dev, R, fam = p.config, p.device, p.R, p.family
    for part in p.parts:
        if part.main_hidden is not None and lw.layer in c.dspark_target_layer_ids:
            draft_tap(
                dev, part.main_hidden, part.rows(p.x), c.dspark_target_layer_ids.index(lw.layer), part.R
            )  # fmt: skip
    H, K = c.num_attention_heads, c.head_dim

    def keys() -> None:
        if whole:
            publish(p, lw, y)
        _window_rows(p, lw, y)
        if whole:
            _attention_mixes(p, lw)

    with p.beside(keys):
        q, qr = _queries(p, lw, y)
        index = _index_query(p, lw, y, qr) if lw.indexer is not None else None
    out = p.temp("attn_out", R, H, K)

    def attend_to_own(part: Part, ws: Workspace) -> None:
        if index is not None:
            _select(p, part, ws, lw, *index)
        chunk, pos, ring = part.rows(p.window_chunk), part.rows(p.pos), part.state.rings[lw.layer]
        comp = picks = None
        if lw.ratio:
            owner = c.kv_owner(lw.layer)
            assert owner is not None
            comp, picks = part.state.sources[owner].comp, part.rows(p.picks)
        attention(
            dev, ws, fam, part.rows(out), part.rows(q), ring, chunk, comp, picks, lw.sinks, pos, lw.freq,
            part.state.first_slot(lw.layer), part.R, window=c.sliding_window,
        )  # fmt: skip
        window_commit(dev, ring, chunk, pos, part.R)

    p.each(attend_to_own)
    u = p.temp("attn_u", R, c.o_groups * c.o_lora_rank)
    linear(dev, p.ws, fam, lw.out_a, u, out, R, groups=c.o_groups)
    back = p.temp("block_out", R, c.hidden_size)
    linear(dev, p.ws, fam, lw.out_b, back, u, R)
    post, comb = _mix(p, "attn")
    expand(dev, p.x, back, post, comb, R)


def feed_forward(p: Pass, lw: LayerWeights) -> None:
    """Router, chosen experts and the shared one; attention's own `pre` collapses the input (model-text 5, 7)."""
    c, dev, R, fam = p.config, p.device, p.R, p.family
    F, k = c.moe_intermediate_size, c.num_experts_per_tok
    z = _block_input(p, _attn_pre(p), lw.ffn_norm)
    post, comb = _mix(p, "ffn")
    shared = p.temp("shared_out", R, c.hidden_size)

    def shared_expert() -> None:
        gate, up, h = p.temp("shared_g", R, F), p.temp("shared_u", R, F), p.temp("shared_h", R, F)
        linear(dev, p.ws, fam, lw.shared_gate, gate, z, R)
        linear(dev, p.ws, fam, lw.shared_up, up, z, R)
        swiglu(dev, h, gate, up, R, F, c.swiglu_limit)
        linear(dev, p.ws, fam, lw.shared_down, shared, h, R)
        mixes(dev, p.ws, lw.hyper_ffn, p.x, p.pre, post, comb, R)

    with p.beside(shared_expert):
        logits = p.temp("router_logits", R, c.n_routed_experts, dtype="f32")
        linear(dev, p.ws, fam, lw.router, logits, z, R)
        chosen, weights = p.temp("experts_chosen", R, k, dtype="i32"), p.temp("expert_weights", R, k, dtype="f32")
        route(dev, p.ws, logits, lw.router_bias, chosen, weights, R, c, lw.router_delta)
        slots = p.temp("expert_out", R, k, c.hidden_size, dtype="f32")
        total = None if p.touched is None else p.touched.view(4 * lw.layer, (1,), "u32")
    experts(dev, p.ws, fam, lw.experts, slots, z, chosen, weights, R, total=total)
    out = p.temp("block_out", R, c.hidden_size)
    moe_sum(dev, out, slots, shared, R)
    if p.moe_tap is not None:
        p.moe_tap(MoeBuffers(lw.layer, logits, chosen, weights, slots, shared, out, post, p.pre))
    expand(dev, p.x, out, post, comb, R)


def run_layer(p: Pass, lw: LayerWeights) -> None:
    """One whole layer for every row of the pass."""
    apply_engram(p, lw)
    attend(p, lw, _block_input(p, p.pre, lw.attn_norm), whole=True)
    feed_forward(p, lw)


def head(p: Pass, w: ModelWeights, logits: Buffer, start: int, count: int) -> None:
    """Logits f32 [count, V] of rows start .. start + count - 1: collapse with the last FFN's pre, norm, output
    head.
    """
    c, S, D = p.config, p.config.hc_mult, p.config.hidden_size
    x = p.x.view(4 * start * S * D, (count, S, D), "f32")
    pre = p.pre.view(4 * start * S, (count, S), "f32")
    h = p.ws.get("head_in", (count, D), p.numerics.act)
    collapse_norm(p.device, h, x, pre, w.norm, count, c.rms_norm_eps)
    linear(p.device, p.ws, p.family, w.head, logits, h, count)
