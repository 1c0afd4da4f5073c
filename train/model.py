"""The backbone as it is trained: whole windows at once, every mechanism of model-text.md, on a CPU.

Parameters carry the released tensor names (`named_parameters()`), except that routed experts are stacked
(`ffn.experts.w13` [E, 2I, D], `.w2` [E, D, I]) and the shared expert's w1 and w3 are one matrix.

B = windows, T = tokens of a window (a multiple of the sliding window W), N = B * T, D = hidden size, S = visible rows
of a compressed cache at the window's end. Positions start at 0 in every window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds4.engram.tables import EngramTables, derive_tables
from ds4.errors import ConfigError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from train import ops

HIDDEN = -1e30  # additive mask
MOE_PAD = 64  # rows an expert's group is padded to


class Node(nn.Module):
    """A module tree that follows dotted tensor names."""

    def put(self, name: str, value: Tensor, *, trained: bool = True) -> None:
        head, _, rest = name.partition(".")
        if not rest:
            self.register_parameter(head, nn.Parameter(value, requires_grad=trained))
            return
        if head not in self._modules:
            self.add_module(head, Node())
        child = self._modules[head]
        assert isinstance(child, Node)
        child.put(rest, value, trained=trained)


@dataclass
class IndexGroup:
    """One index source of a pass: what it scored, what it chose, and where its layers' attention really went."""

    scores: Tensor | None  # f32 [B, T, S], -inf on rows that may not be chosen; has a gradient
    chosen: Tensor | None  # bool [B, T, S]; None: every visible row
    mass: Tensor | None = None  # f32 [B, T, S], attention on compressed rows summed over heads and layers


@dataclass
class Pass:
    """What one forward pass hands from layer to layer."""

    batch: int
    length: int
    sparse: bool  # attend to the indexer's choice only
    learn_index: bool  # keep what the indexer's loss needs
    latents: Tensor | None = None  # roped compressed rows [B, S, d] of the newest kv source
    index_keys: Tensor | None = None  # [B, S, I] of the newest kv source
    candidates: Tensor | None = None  # bool [B, T, S]
    groups: list[IndexGroup] = field(default_factory=list)
    taps: dict[int, Tensor] = field(default_factory=dict)  # layer -> mean of streams [N, D]
    loads: list[Tensor] = field(default_factory=list)  # tokens each expert got, by layer


def normal(shape: Sequence[int], generator: torch.Generator, scale: float) -> Tensor:
    return torch.randn(tuple(shape), generator=generator) * scale


def put_block(root: Node, prefix: str, c: ModelConfig, experts: int, g: torch.Generator) -> None:
    """The weights that every block has, backbone and draft stage alike.

    Matrices start at N(0, 1/inputs), outputs of sublayers smaller; the hyper-connections start near the identity:
    pre sums to about 1 (sigmoid(-1.1) = 1/4 a stream), post is 1, comb favours a stream's own copy.
    """
    d, inner, hd = c.hidden_size, c.moe_intermediate_size, c.head_dim
    group_in = c.num_attention_heads * hd // c.o_groups
    flat = c.o_groups * c.o_lora_rank

    def put(name: str, shape: Sequence[int], scale: float) -> None:
        root.put(f"{prefix}.{name}", normal(shape, g, scale))

    for part in ("attn", "ffn"):
        root.put(f"{prefix}.{part}_norm.weight", torch.ones(d))
        put(f"hc_{part}_fn", (c.hc_mixes, c.hc_mult * d), 0.08 * (c.hc_mult * d) ** -0.5)
        base = torch.cat(
            [torch.full((c.hc_mult,), -1.1), torch.zeros(c.hc_mult), (4 * torch.eye(c.hc_mult)).flatten()]
        )
        root.put(f"{prefix}.hc_{part}_base", base)
        root.put(f"{prefix}.hc_{part}_scale", torch.full((3,), 0.5))
    root.put(f"{prefix}.attn.attn_sink", torch.zeros(c.num_attention_heads))
    put("attn.wq_a.weight", (c.q_lora_rank, d), d**-0.5)
    root.put(f"{prefix}.attn.q_norm.weight", torch.ones(c.q_lora_rank))
    put("attn.wq_b.weight", (c.num_attention_heads * hd, c.q_lora_rank), c.q_lora_rank**-0.5)
    put("attn.wkv.weight", (hd, d), d**-0.5)
    root.put(f"{prefix}.attn.kv_norm.weight", torch.ones(hd))
    put("attn.wo_a.weight", (flat, group_in), group_in**-0.5)
    put("attn.wo_b.weight", (d, flat), 0.3 * flat**-0.5)
    put("ffn.gate.weight", (experts, d), d**-0.5)
    root.put(f"{prefix}.ffn.gate.bias", torch.zeros(experts), trained=False)
    put("ffn.experts.w13", (experts, 2 * inner, d), d**-0.5)
    put("ffn.experts.w2", (experts, d, inner), 0.4 * inner**-0.5)
    put("ffn.shared_experts.w13", (2 * inner, d), d**-0.5)
    put("ffn.shared_experts.w2", (d, inner), 0.4 * inner**-0.5)


def rope_tables(c: ModelConfig, layer: int, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin f32 [length, r / 2]; the angle is one float32 product, as released."""
    angle = torch.arange(length, dtype=torch.float32)[:, None] * torch.tensor(c.rope_frequencies(layer))
    return angle.double().cos().float(), angle.double().sin().float()


def moe(fused: SimpleNamespace, c: ModelConfig, w: Any, z: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Router and experts on z [N, D] -> ([N, D], tokens each expert got f32 [E])."""
    gate = w.ffn.gate
    score = ops.softplus_root(z.float() @ gate.weight.t() / c.gate_temp)
    chosen = (score.detach() + gate.bias).topk(top, -1).indices
    weight = score.gather(1, chosen)
    if c.norm_topk_prob:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    weight = weight * c.routed_scaling_factor
    flat = chosen.reshape(-1)
    n_pairs, n_experts = len(flat), gate.weight.shape[0]
    load = torch.bincount(flat, minlength=n_experts)
    padded = (load + MOE_PAD - 1) // MOE_PAD * MOE_PAD
    n_rows = n_pairs + n_experts * MOE_PAD  # one shape whatever the routing
    order = torch.argsort(flat, stable=True)
    first, padded_first = F.pad(load.cumsum(0), (1, 0))[:-1], F.pad(padded.cumsum(0), (1, 0))[:-1]
    expert = flat[order]
    place = torch.arange(n_pairs) - first[expert] + padded_first[expert]
    pair = torch.full((n_rows,), n_pairs)
    pair[place] = order
    inverse = torch.empty(n_pairs, dtype=torch.long)
    inverse[order] = place
    inverse = inverse.view(-1, top)
    token = torch.where(pair == n_pairs, 0, pair // top)
    row_weight = F.pad(weight.reshape(-1), (0, 1))[pair]  # padding rows weigh nothing
    counts = padded.tolist()
    hidden = ops.GroupedLinear.apply(ops.Permute.apply(z, token, inverse, fused), w.ffn.experts.w13, counts)
    act = fused.swiglu(hidden, row_weight, c.swiglu_limit)
    routed = ops.Unpermute.apply(ops.GroupedLinear.apply(act, w.ffn.experts.w2, counts), token, inverse, fused)
    shared = fused.swiglu(ops.linear(z, w.ffn.shared_experts.w13), None, c.swiglu_limit)
    return routed + ops.linear(shared, w.ffn.shared_experts.w2), load.float()


def project_out(c: ModelConfig, w: Any, o: Tensor) -> Tensor:
    """Heads [N, H, d] -> [N, D]: wo_a within each group of heads, wo_b over all."""
    grouped = o.reshape(o.shape[0], c.o_groups, -1).transpose(0, 1)
    wo_a = w.attn.wo_a.weight.view(c.o_groups, c.o_lora_rank, -1).to(o.dtype)
    u = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1).reshape(o.shape[0], -1)
    return ops.linear(u, w.attn.wo_b.weight)


class Model(nn.Module):
    """The trunk.

    Args:
        config: hc_mult must be 4 and every layer after the first kv source compressed at ratio 1 or 2.
        tables: engram hashing, of the same tokenizer.
        dtype: bfloat16 to train, float32 to compare with the teacher; masters are float32 either way.
        fused: `ops.pieces(...)`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tables: EngramTables,
        dtype: torch.dtype = torch.bfloat16,
        fused: SimpleNamespace | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if config.hc_mult != 4 or any(r not in (0, 1, 2) for r in config.compress_ratios):
            raise ConfigError("training supports hc_mult 4 and compress_ratios 0, 1 and 2 only; change config.json")
        self.config, self.dtype = config, dtype
        self.fused = fused or ops.pieces(False)
        c, g = config, torch.Generator().manual_seed(seed)
        d = c.hidden_size
        root = Node()
        root.put("embed.weight", normal((c.vocab_size, d), g, 0.5))
        root.put("head.weight", normal((c.vocab_size, d), g, 0.5 * d**-0.5))
        root.put("norm.weight", torch.ones(d))
        for layer in range(c.num_hidden_layers):
            put_block(root, f"layers.{layer}", c, c.n_routed_experts, g)
            self._put_layer_extras(root, layer, g)
        self.root = root
        self.hash_map = torch.from_numpy(tables.token_map.astype("int64"))
        self.multipliers = torch.from_numpy(tables.multipliers)
        self.primes = torch.from_numpy(tables.primes.reshape(len(c.engram_layer_ids), -1))
        self.offsets = torch.from_numpy(tables.offsets)
        self.pad = int(tables.pad(config))
        self._lengths: dict[int, SimpleNamespace] = {}

    def _put_layer_extras(self, root: Node, layer: int, g: torch.Generator) -> None:
        c, d, name = self.config, self.config.hidden_size, f"layers.{layer}"
        if layer in c.kv_source_layer_ids:
            root.put(f"{name}.attn.compressor.wkv.weight", normal((c.head_dim, d), g, d**-0.5))
            root.put(f"{name}.attn.compressor.norm.weight", torch.ones(c.head_dim))
            if c.compress_ratios[layer] > 1:
                root.put(f"{name}.attn.compressor.wgate.weight", normal((c.head_dim, d), g, 0.3 * d**-0.5))
            root.put(f"{name}.attn.indexer.wk.weight", normal((c.index_head_dim, c.head_dim), g, c.head_dim**-0.5))
            root.put(f"{name}.attn.indexer.k_norm.weight", torch.ones(c.index_head_dim))
        if layer in c.index_source_layer_ids:
            width = c.index_n_heads * c.index_head_dim
            root.put(f"{name}.attn.indexer.wq_b.weight", normal((width, c.q_lora_rank), g, c.q_lora_rank**-0.5))
            root.put(f"{name}.attn.indexer.weights_proj.weight", normal((c.index_n_heads, d), g, d**-0.5))
        if layer in c.engram_layer_ids:
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            width = c.engram_columns * c.engram_head_dim
            root.put(f"{name}.engram.embed.weight", normal((rows, c.engram_head_dim), g, 0.3))
            root.put(f"{name}.engram.wkv.weight", normal(((c.hc_mult + 1) * d, width), g, width**-0.5))
            root.put(f"{name}.engram.q_weight", torch.ones(c.hc_mult, d))
            root.put(f"{name}.engram.k_weight", torch.ones(c.hc_mult, d))

    def weights(self) -> dict[str, Tensor]:
        """Every weight by its name, the router's biases included."""
        return {n.removeprefix("root."): p for n, p in self.named_parameters()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Raises ConfigError naming the first weight that is missing, extra or of another shape."""
        own = self.weights()
        for name in [*own, *weights]:
            if name not in weights or name not in own or weights[name].shape != own[name].shape:
                theirs = list(weights[name].shape) if name in weights else "missing"
                ours = list(own[name].shape) if name in own else "not in this model"
                raise ConfigError(f"{name}: the checkpoint has {theirs}, this configuration needs {ours}")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(weights[name])

    def layer(self, index: int) -> Any:
        return self.root.layers._modules[str(index)]  # type: ignore[union-attr, operator]

    def trunk(self, ids: Tensor, *, sparse: bool, learn_index: bool = False) -> tuple[Tensor, Pass]:
        """ids i64 [B, T] -> final normed hidden state [N, D], and what the pass kept.

        Raises:
            ConfigError: T is not a multiple of the sliding window.
        """
        c, fused = self.config, self.fused
        batch, length = ids.shape
        if length % c.sliding_window:
            raise ConfigError(f"a window of {length} tokens is not a multiple of sliding_window {c.sliding_window}")
        run = Pass(batch, length, sparse, learn_index)
        x = F.embedding(ids.reshape(-1), self.root.embed.weight).to(self.dtype)  # type: ignore[union-attr, arg-type]
        x = x[:, None].expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(x.shape[0], c.hc_mult)
        pre[:, 0] = 1
        for layer in range(c.num_hidden_layers):
            w = self.layer(layer)
            if layer in c.engram_layer_ids:
                x = self._engram(w, c.engram_layer_ids.index(layer), ids, x)
            if layer in c.dspark_target_layer_ids:
                run.taps[layer] = x.float().mean(1)
            y = fused.collapse_norm(x, pre, w.attn_norm.weight)
            pre, post, comb = self.mix(x, w.hc_attn_fn, w.hc_attn_base, w.hc_attn_scale)
            x = fused.expand(self._attention(w, layer, y, run), x, post, comb)
            z = fused.collapse_norm(x, pre, w.ffn_norm.weight)
            pre, post, comb = self.mix(x, w.hc_ffn_fn, w.hc_ffn_base, w.hc_ffn_scale)
            z, load = moe(fused, c, w, z, c.num_experts_per_tok)
            run.loads.append(load)
            x = fused.expand(z, x, post, comb)
        return fused.collapse_norm(x, pre, self.root.norm.weight), run  # type: ignore[union-attr]

    def mix(self, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        pre, post, comb = self.fused.mixes(x, fn, base, scale, c.hc_eps)
        return pre, post, ops.Sinkhorn.apply(comb.view(-1, 4, 4), c.hc_sinkhorn_iters, c.hc_eps)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of hidden [N, D] against targets i64 [B, T]."""
        return ops.CrossEntropy.apply(hidden, self.root.head.weight, targets.reshape(-1), self.fused)  # type: ignore[union-attr]

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.root.head.weight.to(hidden.dtype).t()).float()  # type: ignore[union-attr, operator]

    def _engram(self, w: Any, slot: int, ids: Tensor, x: Tensor) -> Tensor:
        c = self.config
        rows = F.embedding(self._hash(ids, slot), w.engram.embed.weight).to(self.dtype)
        kv = ops.linear(rows.view(x.shape[0], -1), w.engram.wkv.weight)
        cut = c.hc_mult * c.hidden_size
        key = kv[:, :cut].view(-1, c.hc_mult, c.hidden_size)
        return self.fused.engram_gate(x, key, kv[:, cut:], w.engram.q_weight, w.engram.k_weight)

    def _hash(self, ids: Tensor, slot: int) -> Tensor:
        """Table rows i64 [N, columns] (model-text.md 9.2); nothing stands before a window."""
        c = self.config
        compressed = self.hash_map[ids]
        mixed = compressed * self.multipliers[slot, 0]
        columns = []
        for back in range(1, c.engram_max_ngram_size):
            shifted = F.pad(compressed, (back, 0), value=self.pad)[:, : ids.shape[1]]
            mixed = mixed ^ (shifted * self.multipliers[slot, back])
            for head in range(c.engram_n_heads):
                columns.append(mixed % self.primes[slot, (back - 1) * c.engram_n_heads + head])
        return (torch.stack(columns, -1) + self.offsets[slot]).view(ids.numel(), -1)

    def _attention(self, w: Any, layer: int, x: Tensor, run: Pass) -> Tensor:
        c, fused = self.config, self.fused
        b, t, ratio, hd, win = run.batch, run.length, c.compress_ratios[layer], c.head_dim, c.sliding_window
        at, n_chunks = self._at(t), t // win
        cos, sin = at.rope[ratio > 0]
        qr = fused.rms_norm(ops.linear(x, w.attn.wq_a.weight), w.attn.q_norm.weight)
        q = ops.linear(qr, w.attn.wq_b.weight).view(b, t, c.num_attention_heads, hd)
        q = fused.rope(q, cos[:, None], sin[:, None])
        kv = fused.rms_norm(ops.linear(x, w.attn.wkv.weight), w.attn.kv_norm.weight).view(b, t, hd)
        kv = fused.rope(kv, cos, sin)
        keys = F.pad(kv, (0, 0, win, 0)).unfold(1, 2 * win, win).transpose(2, 3)  # [B, chunks, 2W, d]
        mask = at.window
        group = None
        if ratio:
            self._compress(w, layer, x, run)
            if layer in c.index_source_layer_ids:
                run.groups.append(self._index(w, layer, qr, x, run))
            group, latents = run.groups[-1], run.latents
            assert latents is not None
            keys = torch.cat([keys, latents[:, None].expand(-1, n_chunks, -1, -1)], 2)
            rows = at.visible[ratio]
            if group.chosen is not None:
                rows = additive(group.chosen).view(b, n_chunks, win, 1, -1)
            mask = torch.cat([mask.expand(rows.shape[0], -1, -1, -1, -1), rows], -1)
        q = q.view(b, n_chunks, win, c.num_attention_heads, hd)
        o, p = ops.SinkAttention.apply(q, keys.contiguous(), mask, w.attn.attn_sink, fused)
        if group is not None and run.learn_index:
            mass = p[..., 2 * win :].sum(3, dtype=torch.float32).view(b, t, -1)
            group.mass = mass if group.mass is None else group.mass + mass
        o = fused.rope(o.view(b, t, -1, hd), cos[:, None], -sin[:, None])
        return project_out(c, w, o.view(b * t, -1, hd))

    def _compress(self, w: Any, layer: int, x: Tensor, run: Pass) -> None:
        """A kv source's rows and index keys; other layers keep their owner's."""
        c, fused = self.config, self.fused
        if layer not in c.kv_source_layer_ids:
            return
        b, ratio = run.batch, c.compress_ratios[layer]
        a = ops.linear(x, w.attn.compressor.wkv.weight)
        if ratio > 1:
            a = a.float().view(-1, ratio, c.head_dim)
            gate = ops.linear(x, w.attn.compressor.wgate.weight).float().view(-1, ratio, c.head_dim)
            a = (a * torch.softmax(gate, 1)).sum(1).to(self.dtype)
        latent = fused.rms_norm(a, w.attn.compressor.norm.weight)
        cos, sin = (t[::ratio] for t in self._at(run.length).rope[True])
        run.latents = fused.rope(latent.view(b, -1, c.head_dim), cos, sin)
        if run.sparse or run.learn_index:
            # the indexer learns from its own loss only
            k = fused.rms_norm(ops.linear(latent.detach(), w.attn.indexer.wk.weight), w.attn.indexer.k_norm.weight)
            run.index_keys = fused.rope(k.view(b, -1, c.index_head_dim), cos, sin)

    def _index(self, w: Any, layer: int, qr: Tensor, x: Tensor, run: Pass) -> IndexGroup:
        """Scores and choice of an index source (model-text.md 5.6); nothing of it reaches the trunk's gradient."""
        if not (run.sparse or run.learn_index):
            return IndexGroup(None, None)
        c, fused = self.config, self.fused
        b, t, ratio = run.batch, run.length, c.compress_ratios[layer]
        at = self._at(t)
        cos, sin = at.rope[True]
        assert run.index_keys is not None
        q = ops.linear(qr.detach(), w.attn.indexer.wq_b.weight).view(b, t, c.index_n_heads, c.index_head_dim)
        q = fused.rope(q, cos[:, None], sin[:, None])
        head = ops.linear(x.detach(), w.attn.indexer.weights_proj.weight).float()
        head = head * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        dots = torch.bmm(q.reshape(b, t * c.index_n_heads, -1), run.index_keys.transpose(1, 2))
        scores = fused.index_scores(dots.view(b, t, c.index_n_heads, -1), head.view(b, t, -1))
        scores = scores.masked_fill(~at.seen[ratio], -torch.inf)
        if not run.sparse:
            return IndexGroup(scores, None)
        if layer == c.candidate_source_layer_id:
            run.candidates = candidate_mask(c, scores.detach(), at.lens[ratio])
        elif c.uses_candidates(layer):
            assert run.candidates is not None
            scores = scores.masked_fill(~run.candidates, -torch.inf)
        return IndexGroup(scores, best(scores.detach(), c.index_topk))

    def _at(self, length: int) -> SimpleNamespace:
        """Everything that depends on the window's length alone."""
        if length in self._lengths:
            return self._lengths[length]
        c, win = self.config, self.config.sliding_window
        n_chunks = length // win
        query, key = torch.arange(win), torch.arange(2 * win) - win
        near = (key[None] <= query[:, None]) & (key[None] > query[:, None] - win)
        near = near.expand(n_chunks, win, 2 * win).clone()
        near[0, :, :win] = False  # nothing before the first chunk
        seen, visible, lens = {}, {}, {}
        for ratio in {r for r in c.compress_ratios if r}:
            lens[ratio] = (torch.arange(length) + 1) // ratio
            seen[ratio] = torch.arange(length // ratio)[None] < lens[ratio][:, None]
            visible[ratio] = additive(seen[ratio].view(1, n_chunks, win, 1, -1))
        plain = next(i for i, r in enumerate(c.compress_ratios) if r == 0)
        packed = next(i for i, r in enumerate(c.compress_ratios) if r)
        rope = {False: rope_tables(c, plain, length), True: rope_tables(c, packed, length)}
        window = additive(near.view(1, n_chunks, win, 1, -1))
        self._lengths[length] = SimpleNamespace(rope=rope, window=window, seen=seen, visible=visible, lens=lens)
        return self._lengths[length]


def additive(seen: Tensor) -> Tensor:
    """bool -> bfloat16, 0 where seen and HIDDEN elsewhere."""
    return torch.where(seen, 0.0, HIDDEN).to(torch.bfloat16)


def best(scores: Tensor, k: int) -> Tensor:
    """True at the k largest scores of each row, ties to the lowest row, -inf never: f32 [B, T, S] -> bool.

    Equal scores are common: where every head's dot is negative the score is exactly 0.
    """
    seen = scores > -torch.inf
    if scores.shape[-1] <= k:
        return seen
    last = scores.topk(k, -1).values[..., -1:]
    chosen = (scores >= last) & seen
    many = chosen.sum(-1) > k
    if many.any():  # ties at the border: keep the lowest rows of them
        some, edge = scores[many], last[many]
        above, level = some > edge, some == edge
        room = k - above.sum(-1, keepdim=True)
        chosen[many] = above | (level & (level.cumsum(-1) <= room))
    return chosen


def candidate_mask(c: ModelConfig, scores: Tensor, lens: Tensor) -> Tensor:
    """Rows that later index sources may choose from: the best blocks, the newest visible one always among them."""
    size, s = c.candidate_block_size, scores.shape[-1]
    blocks = F.pad(scores, (0, -s % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    t = torch.arange(blocks.shape[1])[lens > 0]
    blocks[:, t, (lens[t] - 1) // size] = torch.inf
    return best(blocks, c.candidate_topk_blocks).repeat_interleave(size, -1)[..., :s]


def index_loss(run: Pass) -> Tensor:
    """KL from where attention went to what the indexer scored, mean over queries and sources, in nats.

    The target is the attention mass on compressed rows, summed over the heads and layers that share the choice and
    normalised; queries without compressed rows, or with hardly any mass on them, do not count.
    """
    total = torch.zeros(())
    for group in run.groups:
        assert group.scores is not None and group.mass is not None
        mass = group.mass.detach()
        share = mass.sum(-1, keepdim=True)
        target = mass / share.clamp(min=1e-6)
        allowed = group.scores if group.chosen is None else group.scores.masked_fill(~group.chosen, -torch.inf)
        counted = (share[..., 0] > 1e-3) & (allowed > -torch.inf).any(-1)
        log_q = torch.log_softmax(torch.where(counted[..., None], allowed, 0.0), -1)
        kl = torch.where(target > 0, target * (target.clamp(min=1e-12).log() - log_q), 0.0).sum(-1)
        total = total + (kl * counted).sum() / counted.sum().clamp(min=1)
    return total / len(run.groups)


def load_model(work: Path, **kwargs: Any) -> Model:
    """A fresh model of the working folder's config.json and tokenizer.json."""
    config = ModelConfig.load(work)
    return Model(config, derive_tables(config, Tokenizer.from_file(work / "tokenizer.json", config)), **kwargs)
