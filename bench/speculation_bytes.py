"""Bytes per emitted token of the released model: rounds of drafts over plain decode, counted launch by launch.

    python bench/speculation_bytes.py [--accepted 1.5] [--verify 3] [--most-bytes 0.75] [--context 2047]

Every launch of a pass over 1 + k rows, and of drawing a round's drafts, is made at the released shapes on the CPU
driver's count build, weights cut to slices whose bytes are multiplied back (a row's requests repeat; what several
rows read is held to one row's by bench/traffic.py). Bytes of a launch are those that its warps ask for, of no buffer
more than it holds: what is asked for again comes from a cache. Then

    over plain(k) = (pass(1 + k) + drafts) / (1 + accepted) / pass(1)

with `accepted` drafts a round, forced: k = 1 and less cannot reach it and is not shown. Distinct experts of 1..6
neighbouring tokens are those of bench/scheduler.py, whose times by the base's plan stand beside as a check. A draft
stage's picks are taken as independent. Three things are more than the truth: what one launch leaves for the next
counts as if it went through memory, all layers attend to compressed rows, all compressed sources close a group.

The exit code is 1 when k = --verify reads more than --most-bytes of plain decode. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from released import Matrix, Rest, constants, draft_matrices, expert_launches, linear_steps, matrices, released_config
from released import some_experts as placed_experts
from scheduler import DISTINCT, gb10
from watched import Seen, Watched

from ds4.base.plan import plan
from ds4.device import Device
from ds4.engine.ops.draft import draft_argmax, draft_attention, draft_bias, draft_confidence, draft_tap
from ds4.engine.ops.experts import ExpertWeights
from ds4.engine.ops.kv import window_commit, window_kv
from ds4.errors import Ds4Error, UsageError
from ds4.model.config import ModelConfig

ROWS_SLICE, WIDTH_SLICE = 64, 256  # rows of a matrix, width of an expert that are launched
MOST_DISTINCT = round(DISTINCT[-1])


@dataclass(frozen=True)
class Bytes:
    """Of a pass or a part of one: dense weights, experts with their codebooks, everything else."""

    dense: float = 0.0
    experts: float = 0.0
    rest: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.dense + other.dense, self.experts + other.experts, self.rest + other.rest)

    def times(self, n: float) -> Bytes:
        return Bytes(n * self.dense, n * self.experts, n * self.rest)

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.rest

    def megabytes(self) -> dict[str, float]:
        parts = {"dense": self.dense, "experts": self.experts, "rest": self.rest, "total": self.total}
        return {name: round(value / 1e6, 1) for name, value in parts.items()}


def launched(seen: Iterable[Seen]) -> Bytes:
    """Launches that are not cut: a hyper-connection matrix is a dense weight, everything else the rest."""
    out = Bytes()
    for s in seen:
        fn = s.bytes_of("fn")
        out += Bytes(dense=fn, rest=s.memory_bytes - fn)
    return out


class Released:
    """Counts on one device."""

    def __init__(self, context: int) -> None:
        self.config, self.context = released_config(), context
        slow, self.fast = Device.open(simt="count", workers=1), Device.open(simt="fast", workers=1)
        if slow.variant != "count":
            raise Ds4Error("only the CPU driver counts traffic: run with DS4_DRIVER=simt")
        self.dev = constants(slow)
        self.blobs = [t for t in plan(self.config) if t.kind == "blob"]
        widths = sorted({t.bits for t in self.blobs})
        self.weights = {
            bits: placed_experts(self.fast, self.config, bits, WIDTH_SLICE, MOST_DISTINCT) for bits in widths
        }

    def matrix(self, m: Matrix, R: int) -> Bytes:
        """A product of R rows with the whole matrix, as often as a pass has it."""
        s = linear_steps(self.dev, m, R, ROWS_SLICE)
        scale = m.N / min(m.N, ROWS_SLICE)
        weights, y = s.bytes_of("codes") + s.bytes_of("scales"), s.bytes_of("y", kind="store")
        return Bytes(dense=weights * scale, rest=y * scale + s.memory_bytes - weights - y).times(m.count)

    def experts(self, config: ModelConfig, weights: ExpertWeights, R: int, distinct: float) -> Bytes:
        """A layer's experts for R rows that pick `distinct` of them."""
        k, n, scale = config.num_experts_per_tok, round(distinct), config.moe_intermediate_size / WIDTH_SLICE
        steps = np.round(np.linspace(0, n - k, R)).astype(np.int32) if R > 1 else np.zeros(1, np.int32)
        picks = np.arange(k, dtype=np.int32) + steps[:, None]
        if len(np.unique(picks)) != n:
            raise Ds4Error(f"{R} rows of {k} picks do not have {n} distinct ones")
        out = Bytes()
        for s in expert_launches(self.dev, config, weights, "step", R, picks):
            down = s.kernel.name.startswith("experts_down")
            codes = s.bytes_of("codes") + s.bytes_of("plane") + (0 if down else s.bytes_of("gains"))
            gains = s.bytes_of("gains") if down else 0
            book = min(s.bytes_of("codebook"), weights.codebook.nbytes)
            rest = s.memory_bytes - codes - gains - book
            out += Bytes(experts=(codes * scale + gains) * distinct / n + book, rest=rest * scale)
        return out

    def part(self, part: Callable[[], None]) -> Bytes:
        start = len(self.dev.log.seen)
        part()
        return launched(self.dev.log.seen[start:])

    def trunk(self, R: int) -> Bytes:
        """A pass of the model over R rows from position `context` on, its sampling included."""
        c = self.config
        rest = Rest(self.dev, c, R, self.context, c.vocab_size)
        L = c.num_hidden_layers
        parts = (
            (rest.embedding, 1), (rest.hyper, 2 * L), (rest.engram, len(c.engram_layer_ids)),
            (rest.attention_input, L), (rest.publish, len(c.kv_source_layer_ids)),
            (rest.select, len(c.index_source_layer_ids)), (rest.attend, L), (rest.router, L), (rest.sums, L),
            (rest.sampling, 1),
        )  # fmt: skip
        out = sum((self.part(run).times(n) for run, n in parts), Bytes())
        for m in matrices(c):
            out += self.matrix(m, R)
        for bits, weights in self.weights.items():
            n = sum(t.bits == bits and t.name.startswith("blk.") for t in self.blobs)
            if n:
                out += self.experts(c, weights, R, DISTINCT[R - 1]).times(n)
        return out

    def drafts(self, committed: int) -> Bytes:
        """A round of drafts after `committed` rows: their keys, the stages, the output head, draft after draft."""
        c = replace(
            self.config, n_routed_experts=self.config.dspark_n_routed_experts,
            num_experts_per_tok=self.config.dspark_num_experts_per_tok,
        )  # fmt: skip
        B, n = c.dspark_block_size, c.num_nextn_predict_layers
        rest = Rest(self.dev, c, B, self.context, c.vocab_size)
        tail = DraftTail(self.dev, c, rest, committed)
        parts = (
            (rest.embedding, 1), (rest.hyper, 2 * n), (rest.attention_input, n), (tail.attend, n), (rest.router, n),
            (rest.sums, n), (tail.keys, n), (tail.taps, 1), (tail.draft, B), (tail.confidence, 1),
        )  # fmt: skip
        out = sum((self.part(run).times(times) for run, times in parts), Bytes())
        for m in draft_matrices(self.config):
            out += self.matrix(m, 1 if m.names == "markov_head" else B)
        E, k = c.n_routed_experts, c.num_experts_per_tok
        distinct = E * (1 - (1 - k / E) ** B)
        bits = {t.bits for t in self.blobs if t.name.startswith("mtp.")}
        (weights,) = (self.weights[b] for b in bits)
        return out + self.experts(c, weights, B, distinct).times(n)


class DraftTail:
    """What only a round of drafts launches."""

    def __init__(self, dev: Watched, config: ModelConfig, rest: Rest, committed: int) -> None:
        self.dev, self.c, self.rest, self.committed = dev, config, rest, committed

    def attend(self) -> None:
        c, dev, rest, B = self.c, self.dev, self.rest, self.c.dspark_block_size
        H, K = c.num_attention_heads, c.head_dim
        chunk = dev.zeros(rest.layout.window_shape(B + 1), rest.layout.dtype)
        window_kv(dev, chunk, rest.act(B, K), rest.f32(K), rest.pos, rest.freq, B, c.rms_norm_eps)
        ends = dev.upload(np.array([rest.at] + [rest.at + B - 1] * B, np.int32))
        ring = rest.layout.empty_window(dev, c.sliding_window + 64)
        draft_attention(
            dev, rest.ws, rest.act(B, H, K), rest.act(B + 1, H, K), ring, chunk, rest.f32(H), rest.pos, ends,
            rest.freq, dev.zeros((1,), "i32"), B, window=c.sliding_window,
        )  # fmt: skip

    def keys(self) -> None:
        """Keys of the committed rows in one stage's ring."""
        c, dev, rest, R = self.c, self.dev, self.rest, self.committed
        chunk = dev.zeros(rest.layout.window_shape(R), rest.layout.dtype)
        pos = dev.upload(np.arange(rest.at, rest.at + R, dtype=np.int32))
        window_kv(dev, chunk, rest.act(R, c.head_dim), rest.f32(c.head_dim), pos, rest.freq, R, c.rms_norm_eps)
        window_commit(dev, rest.layout.empty_window(dev, c.sliding_window + 64), chunk, pos, R)

    def taps(self) -> None:
        c, targets = self.c, len(self.c.dspark_target_layer_ids)
        y = self.rest.act(self.committed, targets * c.hidden_size)
        for slot in range(targets):
            draft_tap(self.dev, y, self.rest.f32(self.committed, c.hc_mult, c.hidden_size), slot, self.committed)

    def draft(self) -> None:
        """One draft, its Markov product apart."""
        logits = self.rest.f32(1, self.c.vocab_size)
        draft_bias(self.dev, logits, self.rest.f32(1, self.c.vocab_size))
        draft_argmax(self.dev, self.dev.empty((1,), "i32"), logits)

    def confidence(self) -> None:
        c, B, f32 = self.c, self.c.dspark_block_size, self.rest.f32
        x, pre, e = f32(B, c.hc_mult, c.hidden_size), f32(B, c.hc_mult), f32(B, 1, c.dspark_markov_rank)
        draft_confidence(
            self.dev, self.dev.empty((B,), "f32"), f32(c.hidden_size + c.dspark_markov_rank), x, pre, e, B
        )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, printed as they come; returns what the JSON line says."""
    released = Released(args.context)
    block, planned = released.config.dspark_block_size, gb10(released.config)
    plain = released.trunk(1)
    drafts = released.drafts(round(1 + args.accepted))
    print(f"released model at {args.context} tokens, {args.accepted} drafts accepted a round; counted megabytes")
    print("                         dense   experts      rest     total   distinct experts a layer")

    def show(name: str, b: Bytes, more: str) -> None:
        parts = "".join(f"{part / 1e6:10.1f}" for part in (b.dense, b.experts, b.rest, b.total))
        print(f"    {name:16}{parts}   {more}")

    show("plain token", plain, f"{DISTINCT[0]:.1f}")
    show("a round's drafts", drafts, f"block of {block}")
    out: dict[str, Any] = {
        "bench": "speculation_bytes", "context": args.context, "accepted": args.accepted, "verify": args.verify,
        "plain": plain.megabytes(), "drafts": drafts.megabytes(), "rounds": [],
    }  # fmt: skip
    for k in range(max(1, int(np.ceil(args.accepted))), block + 1):
        verify = released.trunk(1 + k)
        ratio = (verify + drafts).total / (1 + args.accepted) / plain.total
        by_plan = (planned.pass_s[k] + planned.draft_s) / (1 + args.accepted) / planned.pass_s[0]
        show(
            f"pass of {1 + k} rows",
            verify,
            f"{DISTINCT[k]:.1f}; k = {k}: {ratio:.3f} of plain, {by_plan:.3f} by plan",
        )
        line = {"k": k, "pass": verify.megabytes(), "over_plain": round(ratio, 4), "by_plan": round(by_plan, 4)}
        out["rounds"].append(line | {"dense_over_plain": round(verify.dense / plain.dense, 6)})
    best = min(out["rounds"], key=lambda r: r["over_plain"])
    out |= {"best_k": best["k"], "best": best["over_plain"]}
    (named,) = (r["over_plain"] for r in out["rounds"] if r["k"] == args.verify)
    out["over_plain"] = named
    print(
        f"fewest bytes at k = {best['k']}: {best['over_plain']:.3f}; k = {args.verify}: {named:.3f} of plain decode"
    )
    missed = [str(r["k"]) for r in out["rounds"] if r["over_plain"] > args.most_bytes]
    if missed:
        print(f"above {args.most_bytes}: k = {', '.join(missed)}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Count bytes per token of rounds of drafts at the released shapes.")
    parser.add_argument("--accepted", type=float, default=1.5, metavar="A", help="drafts accepted a round (1.5)")
    parser.add_argument("--verify", type=int, default=3, metavar="K", help="drafts verified, of the gate (3)")
    parser.add_argument("--most-bytes", type=float, default=0.75, metavar="R", help="exit 1 above R of plain (0.75)")
    parser.add_argument("--context", type=int, default=2047, metavar="N", help="tokens before the pass (2047)")
    args = parser.parse_args()
    try:
        block = released_config().dspark_block_size
        if not 0 <= args.accepted <= args.verify <= block or args.context < 64:
            raise UsageError(f"0 <= accepted <= verify <= {block} and a context of at least 64 tokens, please")
        if args.verify < 1:
            raise UsageError("--verify must be at least 1")
        out = measure(args)
    except Ds4Error as e:
        print(f"speculation_bytes: {e}", file=sys.stderr)
        return 1
    print(json.dumps(out))
    return int(out["over_plain"] > args.most_bytes)


if __name__ == "__main__":
    sys.exit(main())
