"""Muon on matrices, Adam on everything else, and the balancing rule of the router's biases.

Muon: the momentum's direction with all singular values near 1 (five Newton-Schulz steps in bfloat16), scaled by
0.2 sqrt(largest side) so that its size matches Adam's. Embeddings, tables, gates, norms and the hyper-connections
are not matrices in that sense and take Adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
BETAS = (0.9, 0.97)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MUON_SUFFIXES = (
    "wq_a.weight", "wq_b.weight", "attn.wkv.weight", "wo_a.weight", "wo_b.weight", "experts.w13", "experts.w2",
    "compressor.wkv.weight", "compressor.wgate.weight", "indexer.wk.weight", "engram.wkv.weight", "main_proj.weight",
)  # fmt: skip
# Adam's step relative to the base rate, by how the name ends or what it holds; the first that fits counts
ADAM_RATES = (
    ("engram.embed.weight", 2.0),
    ("markov_head.embed.weight", 1.0),
    ("markov_head.head.weight", 0.5),
    ("embed.weight", 0.5),
    ("head.weight", 0.33),
    ("gate.weight", 0.33),
    ("_fn", 0.33),
    ("_base", 0.33),
    ("_scale", 0.33),
)


@dataclass(frozen=True)
class Rates:
    muon: float = 0.012
    adam: float = 4e-3
    decay: float = 0.05  # of the matrices, times the rate
    clip: float = 1.0  # global norm of what Adam updates
    bias: float = 0.003  # step of the router's biases


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest half-orthogonal matrix, roughly: [.., O, I] -> f32 [.., O, I]."""
    a, b, c = NEWTON_SCHULZ
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().square().sum((-2, -1), keepdim=True).sqrt().bfloat16() + 1e-7)
    for _ in range(steps):
        y = x @ x.mT
        x = a * x + (b * y + c * (y @ y)) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Updates of the named parameters that have a gradient.

    Args:
        named: the parameters this process updates.
        groups: name ending -> how many matrices are stacked in that weight's rows.
        state: name -> buffer, zeros at the start; made here where None. Muon's momentum has the parameter's name,
            Adam's moments have `:m` and `:v` after it.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        rates: Rates,
        groups: Mapping[str, int],
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.rates, self.groups, self.steps = rates, groups, 0
        self.muon: dict[str, nn.Parameter] = {}
        self.adam: dict[str, nn.Parameter] = {}
        for name, p in named:
            (self.muon if name.endswith(MUON_SUFFIXES) else self.adam)[name] = p
        shapes = {n: self.parameter(n).shape for n in state_names([*self.muon, *self.adam])}
        self.state = dict(state) if state is not None else {n: torch.zeros(s) for n, s in shapes.items()}

    def parameter(self, state_name: str) -> nn.Parameter:
        name = state_name.split(":")[0]
        return self.muon[name] if name in self.muon else self.adam[name]

    def squared_norm(self) -> float:
        """Of the gradients that Adam uses; Muon's updates do not depend on a gradient's size."""
        return sum(float(p.grad.square().sum()) for p in self.adam.values() if p.grad is not None)

    @torch.no_grad()
    def step(self, factor: float, norm: float) -> None:
        """One update at `factor` times the base rates, Adam's gradients clipped by the whole `norm`; clears them."""
        self.steps += 1
        r, t = self.rates, self.steps
        for name, p in self.muon.items():
            if p.grad is None:
                continue
            buffer = self.state[name]
            buffer.lerp_(p.grad, 1 - MOMENTUM)
            update = torch.lerp(p.grad, buffer, MOMENTUM)
            split = next((n for suffix, n in self.groups.items() if name.endswith(suffix)), 1)
            update = orthogonal(update.view(split, -1, p.shape[-1]) if split > 1 else update)
            size = 0.2 * max(update.shape[-2:]) ** 0.5
            p.mul_(1 - r.muon * factor * r.decay).add_(update.view_as(p), alpha=-r.muon * factor * size)
            p.grad = None
        shrink = min(1.0, r.clip / (norm + 1e-6))
        for name, p in self.adam.items():
            if p.grad is None:
                continue
            g = p.grad.mul_(shrink)
            m, v = self.state[f"{name}:m"], self.state[f"{name}:v"]
            m.lerp_(g, 1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            rate = r.adam * factor * next((f for part, f in ADAM_RATES if part in name), 1.0)
            scale = (v / (1 - BETAS[1] ** t)).sqrt_().add_(1e-10)
            p.addcdiv_(m / (1 - BETAS[0] ** t), scale, value=-rate)
            p.grad = None


def state_names(names: Iterable[str]) -> list[str]:
    """Buffers that the parameters of these names need."""
    return [s for n in names for s in ((n,) if n.endswith(MUON_SUFFIXES) else (f"{n}:m", f"{n}:v"))]


@torch.no_grad()
def balance(bias: Tensor, load: Tensor, step: float) -> None:
    """Move an expert's bias up when it got less than its share, down when it got more (noaux)."""
    bias += step * torch.sign(load.mean() - load)
