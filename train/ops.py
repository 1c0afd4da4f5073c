"""Differentiable pieces of the model that decide how long training takes on a CPU.

Shapes: N = tokens of the batch, D = hidden size, H = streams (hc_mult), E = experts. Every function computes in
float32 inside and returns the dtype of its main input, so that the same code trains in bfloat16 and is compared with
the teacher in float32. `compiled()` gives the fused versions; the plain ones are what they are compiled from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.cpp_extension import load

TINY = 1e-20  # rms_norm_eps of the release, float32


@functools.cache
def _sinkhorn_extension() -> ModuleType:
    """Built once by the host compiler and kept in torch's extension cache."""
    source = str(Path(__file__).with_name("sinkhorn.cpp"))
    module: ModuleType = load(
        "ds4_train_sinkhorn", [source], extra_cflags=["-O3", "-march=native", "-fno-math-errno"]
    )
    return module


class Sinkhorn(torch.autograd.Function):
    """Logits f32 [N, 4, 4] -> doubly normalised f32 [N, 4, 4] (model-text.md 5.1)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int, heps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iters, ctx.heps = iters, heps
        return _sinkhorn_extension().forward(logits, iters, heps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sinkhorn_extension().backward(ctx.saved_tensors[0], grad, ctx.iters, ctx.heps), None, None


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last axis; weight f32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + TINY)
    return (y * weight).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., I] @ weight [O, I]^T, the f32 master cast to x's dtype."""
    return x @ weight.to(x.dtype).t()


def collapse_norm(x: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm(sum_c pre[c] X[c]): x [N, 4, D], pre f32 [N, 4] -> [N, D]."""
    y = (
        pre[:, 0, None] * x[:, 0].float()
        + pre[:, 1, None] * x[:, 1].float()
        + pre[:, 2, None] * x[:, 2].float()
        + pre[:, 3, None] * x[:, 3].float()
    )
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + TINY)
    return (y * weight).to(x.dtype)


def mixes(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, heps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, 4, D] -> pre f32 [N, 4], post f32 [N, 4], comb logits f32 [N, 16] (model-text.md 5.1)."""
    v = x.reshape(x.shape[0], -1)
    m = (v @ fn.to(v.dtype).t()).float() * torch.rsqrt(v.float().square().mean(-1, keepdim=True) + TINY)
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + heps
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    return pre, post, m[:, 8:] * scale[2] + base[8:]


def expand(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'[k] = post[k] y + sum_j comb[j, k] X[j]: y [N, D], x [N, 4, D], comb f32 [N, 4, 4]."""
    f, g = x.float(), y.float()
    out = [
        post[:, k, None] * g
        + comb[:, 0, k, None] * f[:, 0]
        + comb[:, 1, k, None] * f[:, 1]
        + comb[:, 2, k, None] * f[:, 2]
        + comb[:, 3, k, None] * f[:, 3]
        for k in range(4)
    ]
    return torch.stack(out, 1).to(x.dtype)


def swiglu(gate_up: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """[R, 2I] (gate rows, then up) -> silu(min(g, limit)) * clamp(u) * weight[R]; the gate has no lower clamp."""
    half = gate_up.shape[-1] // 2
    g = torch.clamp(gate_up[..., :half].float(), max=limit)
    u = torch.clamp(gate_up[..., half:].float(), -limit, limit)
    a = g * torch.sigmoid(g) * u
    if weight is not None:
        a = a * weight[:, None]
    return a.to(gate_up.dtype)


def engram_gate(x: Tensor, key: Tensor, value: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
    """x, key [N, 4, D], value [N, D] -> x + gate * value (model-text.md 9.3)."""
    xf, kf = x.float(), key.float()
    dot = (xf * kf * (q_weight * k_weight)).sum(-1)
    dot = dot * torch.rsqrt(xf.square().mean(-1) + TINY) * torch.rsqrt(kf.square().mean(-1) + TINY)
    dot = dot * x.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp(min=1e-6)), dot))
    return (xf + gate[:, :, None] * value.float()[:, None]).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs of the last dims; cos, sin f32 broadcast to [.., r / 2]. Inverse: -sin."""
    r = cos.shape[-1] * 2
    pairs = x[..., -r:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-r], rotated.to(x.dtype)], -1)


def gather_sum(rows: Tensor, index: Tensor) -> Tensor:
    """rows [R, D], index i64 [N, K] -> the sum of each K rows [N, D]."""
    total = rows[index[:, 0]].float()
    for k in range(1, index.shape[1]):
        total = total + rows[index[:, k]].float()
    return total.to(rows.dtype)


def choice_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """logits [R, V], target i64 [R] -> nats f32 [R], and their gradient by the logits [R, V] in logits' dtype."""
    x = logits.float()
    lse = torch.logsumexp(x, -1)
    hit = torch.arange(logits.shape[1])[None] == target[:, None]
    nats = lse - torch.where(hit, x, 0.0).sum(-1)
    return nats, (torch.exp(x - lse[:, None]) - hit.float()).to(logits.dtype)


def index_scores(dots: Tensor, head: Tensor) -> Tensor:
    """sum_h head[h] max(0, dots[h]): dots [B, T, Hi, S], head f32 [B, T, Hi] -> f32 [B, T, S]."""
    return (torch.relu(dots.float()) * head[..., None]).sum(2)


def sink_softmax(scores: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """scores [B, C, Q, H, S], mask additive [B or 1, C, Q, 1, S], sink f32 [H] -> probabilities.

    The sink adds to the sum only.
    """
    s = scores.float() * scale + mask
    top = torch.maximum(s.amax(-1, keepdim=True), sink[:, None])
    e = torch.exp(s - top)
    return (e / (e.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top))).to(scores.dtype)


def sink_softmax_back(p: Tensor, dp: Tensor, grad_o: Tensor, o: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Backward of the above with o = p @ keys: -> d scores, d sink f32 [H]."""
    dl = (grad_o.float() * o.float()).sum(-1)
    pf = p.float()
    return (pf * (dp.float() - dl[..., None]) * scale).to(p.dtype), -((1 - pf.sum(-1)) * dl).sum((0, 1, 2))


class SinkAttention(torch.autograd.Function):
    """Attention of query chunks on their own key lists, one vector being key and value for all heads.

    q [B, C, Q, H, d], keys [B, C, S, d], mask additive, sink f32 [H] -> o like q and, not differentiable, the
    probabilities [B, C, Q, H, S].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, fused: SimpleNamespace) -> Any:
        b, c, rows, h, d = q.shape
        flat, keys = q.reshape(b * c, rows * h, d), keys.reshape(b * c, -1, d)
        scores = torch.bmm(flat, keys.transpose(1, 2)).view(b, c, rows, h, -1)
        p = fused.sink_softmax(scores, mask, sink, d**-0.5)
        o = torch.bmm(p.view(b * c, rows * h, -1), keys).view(q.shape)
        ctx.save_for_backward(flat, keys, p, o)
        ctx.fused = fused
        ctx.mark_non_differentiable(p)
        ctx.set_materialize_grads(False)  # no array of zeros for p
        return o, p

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        flat, keys, p, o = ctx.saved_tensors
        b, c, rows, h, d = o.shape
        grad = grad.contiguous()
        g = grad.view(b * c, rows * h, d)
        dp = torch.bmm(g, keys.transpose(1, 2)).view(p.shape)
        ds, dsink = ctx.fused.sink_softmax_back(p, dp, grad, o, d**-0.5)
        ds, pf = ds.view(b * c, rows * h, -1), p.view(b * c, rows * h, -1)
        dq = torch.bmm(ds, keys)
        dk = torch.bmm(ds.transpose(1, 2), flat).add_(torch.bmm(pf.transpose(1, 2), g))
        return dq.view(o.shape), dk.view(b, c, -1, d), None, dsink, None


class Permute(torch.autograd.Function):
    """x [N, D] -> rows sorted by expert [R, D]; `token` names each row's token, `inverse` [N, K] each pair's row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, inverse: Tensor, fused: SimpleNamespace) -> Tensor:
        ctx.inverse, ctx.fused = inverse, fused
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.fused.gather_sum(grad.contiguous(), ctx.inverse), None, None, None


class Unpermute(torch.autograd.Function):
    """Rows [R, D] -> the sum of each token's rows [N, D]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor, inverse: Tensor, fused: SimpleNamespace) -> Tensor:
        ctx.token = token
        return fused.gather_sum(y, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(0, ctx.token), None, None, None


class GroupedLinear(torch.autograd.Function):
    """Rows in consecutive groups, one weight a group: x [R, I], weight f32 [E, O, I], counts -> [R, O].

    Groups are padded by the caller to a multiple of 64 rows: each new matrix shape costs a just-in-time compile in
    the CPU library. Rows past the last group come out as zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        w = weight.to(x.dtype)
        y = x.new_empty(x.shape[0], w.shape[1])
        at = 0
        for e, n in enumerate(counts):
            if n:
                torch.mm(x[at : at + n], w[e].t(), out=y[at : at + n])
                at += n
        y[at:] = 0
        ctx.save_for_backward(x, w)
        ctx.counts = counts
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        grad = grad.contiguous()
        dx = torch.empty_like(x)
        dw = torch.zeros(w.shape, dtype=torch.float32)
        at = 0
        for e, n in enumerate(ctx.counts):
            if n:
                torch.mm(grad[at : at + n], w[e], out=dx[at : at + n])
                dw[e] = grad[at : at + n].t() @ x[at : at + n]
                at += n
        dx[at:] = 0
        return dx, dw, None


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of h [N, D] @ head [V, D]^T against targets [N], chunked: no [N, V] array ever exists."""

    ROWS = 2048

    @staticmethod
    def forward(ctx: Any, h: Tensor, head: Tensor, target: Tensor, fused: SimpleNamespace) -> Tensor:
        w = head.to(h.dtype)
        dh, dw = torch.empty_like(h), torch.zeros(head.shape)
        total = torch.zeros(())
        for at in range(0, h.shape[0], CrossEntropy.ROWS):
            x, t = h[at : at + CrossEntropy.ROWS], target[at : at + CrossEntropy.ROWS]
            nats, g = fused.choice_loss(x @ w.t(), t)
            total += nats.sum()
            torch.mm(g, w, out=dh[at : at + CrossEntropy.ROWS])
            dw += g.t() @ x
        ctx.save_for_backward(dh, dw)
        return total / h.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dh, dw = ctx.saved_tensors
        n = dh.shape[0]
        return (dh.float() * (grad / n)).to(dh.dtype), dw * (grad / n), None, None


FUSED: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        collapse_norm,
        mixes,
        expand,
        swiglu,
        engram_gate,
        rope,
        rms_norm,
        gather_sum,
        index_scores,
        choice_loss,
        sink_softmax,
        sink_softmax_back,
    )
}


def pieces(compiled: bool) -> SimpleNamespace:
    """The fusable functions by name: as written, or each compiled for the shapes it meets."""
    if not compiled:
        return SimpleNamespace(**FUSED)
    return SimpleNamespace(**{n: torch.compile(f, dynamic=False) for n, f in FUSED.items()})


def softplus_root(u: Tensor) -> Tensor:
    """sqrt(softplus(u)), the router's score; softplus is linear above 20."""
    return torch.sqrt(F.softplus(u) + 1e-12)
