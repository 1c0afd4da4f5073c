"""Train the draft stages on a finished trunk: `python -m train.draft [--work DIR] [--run NAME] [--tokens N]`.

The trunk stands still. Each window gets anchors; at an anchor b the stages see the main rows up to b and the block
[token b+1, noise, noise, ..], exactly as a drafting round does (dspark.md 6), with the text's own tokens for the
Markov bias. Row i learns the trunk's distribution after position b+1+i. The confidence head learns the overlap of
the two distributions, which is the probability that a sampled draft is accepted.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds4.errors import FileFormatError
from train import ops
from train.config import WORK
from train.data import held_out
from train.loop import Run, Stage, load_checkpoint, save_checkpoint, train, training_command
from train.model import HIDDEN, Model, Node, load_model, moe, normal, project_out, put_block, rope_tables
from train.optim import Rates
from train.train import LONG_MIX

FORGET = 0.85  # weight of a row relative to the one before: a later draft counts only when the earlier ones do
OVERLAP_WEIGHT, CONFIDENCE_WEIGHT = 1.0, 0.2
ANCHORS = 40
FIRST_ANCHOR = 4  # a draft may follow a very short prompt
JUDGED = ("code", "law", "medicine", "science", "general", "dialogues", "unseen")


class DraftLoss(torch.autograd.Function):
    """Per-row KL(p || q) + OVERLAP_WEIGHT (1 - sum min(p, q)), weighted mean; p the trunk's, q the draft's.

    h, target f32-normed [R, D]; e [R, r] Markov embeddings; head [V, D] frozen; markov [V, r]; weight f32 [R].
    Returns the loss, the overlap f32 [R] and whether the first choices agree bool [R]. Chunked: no [R, V] array.
    """

    ROWS = 1024

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, e: Tensor, markov: Tensor, head: Tensor, target: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, w, m = h.shape[0], head.to(h.dtype), markov.to(h.dtype)
        dh, de, dm = torch.empty_like(h), torch.empty_like(e), torch.zeros(markov.shape)
        overlap, agree, total = torch.empty(n), torch.empty(n, dtype=torch.bool), torch.zeros(())
        scale = weight / weight.sum()
        for lo in range(0, n, DraftLoss.ROWS):
            at = slice(lo, lo + DraftLoss.ROWS)
            log_p = torch.log_softmax((target[at] @ w.t()).float(), -1)
            log_q = torch.log_softmax((h[at] @ w.t()).float() + (e[at] @ m.t()).float(), -1)
            p, q = log_p.exp(), log_q.exp()
            agree[at] = log_p.argmax(-1) == log_q.argmax(-1)
            overlap[at] = torch.minimum(p, q).sum(-1)
            kl = (p * (log_p - log_q)).sum(-1)
            total += ((kl + OVERLAP_WEIGHT * (1 - overlap[at])) * scale[at]).sum()
            less = (q < p).float()
            grad = q - p - OVERLAP_WEIGHT * q * (less - (less * q).sum(-1, keepdim=True))
            g = (grad * scale[at, None]).to(h.dtype)
            dh[at], de[at] = g @ w, g @ m
            dm += (g.t() @ e[at]).float()
        ctx.save_for_backward(dh, de, dm)
        ctx.mark_non_differentiable(overlap, agree)
        return total, overlap, agree

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        dh, de, dm = ctx.saved_tensors
        return dh * grad, de * grad, dm * grad, None, None, None


class Stages(nn.Module):
    """The draft stages' weights and their round on many anchors at once."""

    def __init__(self, trunk: Model, seed: int = 0) -> None:
        super().__init__()
        self.trunk_ref = [trunk]  # not a submodule: it is not trained here
        c, g = trunk.config, torch.Generator().manual_seed(seed + 1)
        d, rank, last = c.hidden_size, c.dspark_markov_rank, c.num_nextn_predict_layers - 1
        taps = len(c.dspark_target_layer_ids)
        root = Node()
        for i in range(c.num_nextn_predict_layers):
            put_block(root, f"mtp.{i}", c, c.dspark_n_routed_experts, g)
        root.put("mtp.0.main_proj.weight", normal((d, taps * d), g, (taps * d) ** -0.5))
        root.put("mtp.0.main_norm.weight", torch.ones(d))
        root.put(f"mtp.{last}.norm.weight", trunk.weights()["norm.weight"].detach().clone())
        root.put(f"mtp.{last}.markov_head.embed.weight", normal((c.vocab_size, rank), g, 0.3))
        root.put(f"mtp.{last}.markov_head.head.weight", torch.zeros(c.vocab_size, rank))
        root.put(f"mtp.{last}.confidence_head.proj.weight", torch.zeros(1, d + rank))
        self.root = root

    def weights(self) -> dict[str, nn.Parameter]:
        return {n.removeprefix("root."): p for n, p in self.named_parameters()}

    def round(self, ids: Tensor, taps: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """One round at every anchor of every window.

        Args:
            ids: i64 [B, T + 1], the text.
            taps: [B * T, targets * D], the trunk's main rows.
            anchors: i64 [A], positions b with b + 1 + block <= T.

        Returns:
            normed hidden [B * A * block, D], pre-norm hidden of the same shape, Markov embeddings
            [B * A * block, r], and each stage's expert loads.
        """
        trunk = self.trunk_ref[0]
        c, fused = trunk.config, trunk.fused
        batch, length, block, n_anchors = ids.shape[0], ids.shape[1] - 1, c.dspark_block_size, len(anchors)
        stage0, last = self.stage(0), self.stage(c.num_nextn_predict_layers - 1)
        main = fused.rms_norm(ops.linear(taps, stage0.main_proj.weight), stage0.main_norm.weight)
        rows = torch.full((batch, n_anchors, block), c.dspark_noise_token_id)
        rows[:, :, 0] = ids[:, anchors + 1]
        x = F.embedding(rows.reshape(-1), trunk.root.embed.weight).to(trunk.dtype)  # type: ignore[union-attr, arg-type]
        x = x[:, None].expand(-1, c.hc_mult, -1).contiguous()
        pre = torch.zeros(x.shape[0], c.hc_mult)
        pre[:, 0] = 1
        cos, sin = rope_tables(c, c.num_hidden_layers, length + block + 1)
        at = (anchors[:, None] + 1 + torch.arange(block)).reshape(-1)  # [A * block]
        near = torch.arange(length)[None] <= anchors[:, None]
        near &= torch.arange(length)[None] > anchors[:, None] - c.sliding_window
        mask = torch.where(near, 0.0, HIDDEN).view(1, n_anchors, 1, length)
        loads = []
        for i in range(c.num_nextn_predict_layers):
            w = self.stage(i)
            y = fused.collapse_norm(x, pre, w.attn_norm.weight)
            pre, post, comb = trunk.mix(x, w.hc_attn_fn, w.hc_attn_base, w.hc_attn_scale)
            y = self._attention(w, y, main, (cos[at], sin[at]), (cos[:length], sin[:length]), mask, batch)
            x = fused.expand(y, x, post, comb)
            z = fused.collapse_norm(x, pre, w.ffn_norm.weight)
            pre, post, comb = trunk.mix(x, w.hc_ffn_fn, w.hc_ffn_base, w.hc_ffn_scale)
            z, load = moe(fused, c, w, z, c.dspark_num_experts_per_tok)
            loads.append(load)
            x = fused.expand(z, x, post, comb)
        bare = (pre[:, :, None] * x.float()).sum(1)
        before = ids[:, at].reshape(-1)  # the token before each row's prediction
        markov = F.embedding(before, last.markov_head.embed.weight).to(trunk.dtype)
        return fused.collapse_norm(x, pre, last.norm.weight), bare, markov, loads

    def stage(self, index: int) -> Any:
        return self.root.mtp._modules[str(index)]  # type: ignore[union-attr, operator]

    def _attention(
        self,
        w: Any,
        y: Tensor,
        main: Tensor,
        turn: tuple[Tensor, Tensor],
        turn_main: tuple[Tensor, Tensor],
        mask: Tensor,
        batch: int,
    ) -> Tensor:
        """Every row sees the anchor's window of main-stream keys and every row of its own block."""
        trunk = self.trunk_ref[0]
        c, fused = trunk.config, trunk.fused
        heads, hd, block = c.num_attention_heads, c.head_dim, c.dspark_block_size
        cos, sin = turn
        qr = fused.rms_norm(ops.linear(y, w.attn.wq_a.weight), w.attn.q_norm.weight)
        q = ops.linear(qr, w.attn.wq_b.weight).view(batch, -1, heads, hd)
        q = fused.rope(q, cos[:, None], sin[:, None])
        own = fused.rms_norm(ops.linear(y, w.attn.wkv.weight), w.attn.kv_norm.weight).view(batch, -1, hd)
        own = fused.rope(own, cos, sin)
        keys = fused.rms_norm(ops.linear(main, w.attn.wkv.weight), w.attn.kv_norm.weight).view(batch, -1, hd)
        keys = fused.rope(keys, *turn_main)
        n_anchors = own.shape[1] // block
        on_main = torch.bmm(q.reshape(batch, -1, hd), keys.transpose(1, 2)).view(batch, n_anchors, block * heads, -1)
        q_block = q.reshape(batch * n_anchors, block * heads, hd)
        own_block = own.reshape(batch * n_anchors, block, hd)
        on_block = torch.bmm(q_block, own_block.transpose(1, 2)).view(batch, n_anchors, block * heads, block)
        scale = hd**-0.5
        sink = w.attn.attn_sink.repeat(block).view(1, 1, -1, 1).expand(batch, n_anchors, -1, 1)
        scores = torch.cat([on_main.float() * scale + mask, on_block.float() * scale, sink], -1)
        p = torch.softmax(scores, -1).to(q.dtype)
        length = keys.shape[1]
        o = torch.bmm(p[..., :length].reshape(batch, -1, length), keys).view(batch * n_anchors, block * heads, hd)
        o = o + torch.bmm(p[..., length:-1].reshape(batch * n_anchors, block * heads, block), own_block)
        o = fused.rope(o.view(batch, -1, heads, hd), cos[:, None], -sin[:, None])
        return project_out(c, w, o.reshape(-1, heads, hd))


def make_draft(work: Path, trunk_checkpoint: Path) -> Draft:
    """Fresh stages on a trained trunk, for a process of the loop."""
    trunk = load_model(work, fused=ops.pieces(compiled=True))
    trunk.load_weights(load_checkpoint(trunk_checkpoint)["weights"])
    return Draft(work, trunk)


class Draft:
    """The draft stages as the loop sees them."""

    def __init__(self, work: Path, trunk: Model) -> None:
        self.work, self.trunk = work, trunk.requires_grad_(False)
        self.stages = Stages(trunk)

    def weights(self) -> dict[str, nn.Parameter]:
        return self.stages.weights()

    def trained(self, stage: Stage) -> set[str]:
        return {n for n in self.weights() if not n.endswith("gate.bias")}

    def losses(self, ids: Tensor, stage: Stage) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
        c = self.trunk.config
        g = torch.Generator().manual_seed(int(ids.sum()))  # anchors follow from the batch alone
        room = ids.shape[1] - 1 - c.dspark_block_size - FIRST_ANCHOR
        anchors = torch.randperm(room, generator=g)[:ANCHORS].sort().values + FIRST_ANCHOR
        loss, overlap, agree, confidence, loads = self.rounds(ids, anchors)
        target = overlap.detach()
        sure = F.binary_cross_entropy_with_logits(confidence, target)
        biases = {f"mtp.{i}.ffn.gate.bias": load for i, load in enumerate(loads)}
        per_row = overlap.view(-1, c.dspark_block_size)
        figures = {
            "accepted": float(per_row.cumprod(1).sum(1).mean()),
            "first": float(agree.view(-1, c.dspark_block_size)[:, 0].float().mean()),
            "confidence": sure.item(),
        }
        return loss + CONFIDENCE_WEIGHT * sure, figures, biases

    def rounds(self, ids: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """Loss, overlap f32 [R], first choices agree bool [R], confidence f32 [R], loads; R = B * A * block."""
        c, block = self.trunk.config, self.trunk.config.dspark_block_size
        with torch.no_grad():
            hidden, run = self.trunk.trunk(ids[:, :-1], sparse=True)
            taps = torch.cat([run.taps[i] for i in c.dspark_target_layer_ids], -1).to(self.trunk.dtype)
            at = (anchors[:, None] + 1 + torch.arange(block)).reshape(-1)
            target = hidden.view(ids.shape[0], -1, c.hidden_size)[:, at].reshape(-1, c.hidden_size)
        normed, bare, markov, loads = self.stages.round(ids, taps, anchors)
        last = self.stages.stage(c.num_nextn_predict_layers - 1)
        weight = (FORGET ** torch.arange(block)).repeat(normed.shape[0] // block)
        loss, overlap, agree = DraftLoss.apply(
            normed, markov, last.markov_head.head.weight, self.trunk.root.head.weight, target, weight
        )
        confidence = torch.cat([bare, markov.float()], -1) @ last.confidence_head.proj.weight[0]
        return loss, overlap, agree, confidence, loads

    def figures(self) -> list[str]:
        return [f"{d}.{what}" for d in JUDGED for what in ("accepted", "first")]

    def measure(self, figure: str, stage: Stage) -> float:
        """Expected accepted drafts at temperature 1, or greedy agreement of the first draft, on judge text."""
        domain, what = figure.split(".")
        ids = torch.from_numpy(held_out(self.work, domain, "judge", 16, stage.length))
        block = self.trunk.config.dspark_block_size
        anchors = torch.arange(FIRST_ANCHOR, stage.length - block, block)[:ANCHORS]
        _, overlap, agree, _, _ = self.rounds(ids, anchors)
        if what == "first":
            return float(agree.view(-1, block)[:, 0].float().mean())
        return float(overlap.view(-1, block).cumprod(1).sum(1).mean())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train.draft", description=__doc__.split("\n\n")[0])
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    parser.add_argument(
        "--run", default="embedded", help="the trunk's run; drafts go into RUN/draft, then RUN/model.pt"
    )
    parser.add_argument("--tokens", type=float, default=5e6, help="tokens of text (default 5e6)")
    parser.add_argument("--batch", type=int, default=16, help="windows a step and process (default 16)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.tokens <= 0 or args.batch <= 0:
        parser.error("--tokens and --batch must be positive")
    return training_command("draft", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    folder = args.work / "runs" / args.run
    trunk_checkpoint = folder / "last.pt"
    if not trunk_checkpoint.exists():
        raise FileFormatError(f"{trunk_checkpoint}: no trained trunk; run train.train --run {args.run} first")
    trunk = load_checkpoint(trunk_checkpoint)
    if trunk["position"]["stage"] < len(trunk["stages"]):
        raise FileFormatError(
            f"{trunk_checkpoint}: the trunk's training is not finished; run train.train again first"
        )
    model = load_model(args.work)
    model.load_weights(trunk["weights"])
    plan = Run(
        folder=folder / "draft",
        config=trunk["config"],
        make=functools.partial(make_draft, args.work, trunk_checkpoint),
        stages=[Stage("draft", int(args.tokens), args.batch, 256, LONG_MIX, 0.0, 1.0, hold=0.4)],
        work=args.work,
        seed=args.seed + 1,
        rates=Rates(),
        groups={"attn.wo_a.weight": trunk["config"]["text_config"]["o_groups"]},
    )
    first = {n: p.data for n, p in Stages(model, args.seed).weights().items()}
    drafts = train(plan, first)
    whole = {"config": trunk["config"], "weights": trunk["weights"] | drafts["weights"]}
    save_checkpoint(folder / "model.pt", whole)
    print(f"{folder / 'model.pt'}: trunk and draft stages; export it with train.export")
    return 0


if __name__ == "__main__":
    sys.exit(main())
