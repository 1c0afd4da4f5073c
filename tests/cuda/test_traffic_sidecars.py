"""What a mounted sidecar adds to the bytes that kernels ask for, counted; and to a token of the released model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.base.plan import plan
from ds4.device import Device
from ds4.device.kernels import Kernel
from ds4.device.kernels.experts import DOWN, DOWN_MMA, GATE_UP, GATE_UP_MMA
from ds4.device.kernels.router import ROUTE
from ds4.engine.ops.experts import ExpertWeights, experts, place_experts
from ds4.engine.ops.router import route
from ds4.engine.scratch import Workspace
from ds4.model.config import ModelConfig
from tests.cuda.test_experts_sidecar import placed
from tests.cuda.test_traffic_weights import check_formula, counted
from tests.reference_dense import bf16_bits
from tests.reference_experts import random_blob
from tests.reference_sidecar import lattice

PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "published"
NAMES = ("domain", "domain_scale", "post", "post_scale")


def run(device: Device, family: str, ew: ExpertWeights, picks: np.ndarray) -> dict[str, dict[str, dict[str, int]]]:
    """Counters of the gate-up and down kernels of one call, by argument."""
    R, k = picks.shape
    x = device.upload(bf16_bits(np.ones((R, ew.D), np.float32)), "bf16")
    weights = device.upload(np.ones((R, k), np.float32))
    y = device.empty((R, k, ew.D), "f32")
    device.reset_counters()
    experts(device, Workspace(device), family, ew, y, x, device.upload(picks), weights, R)
    return {"up": counted(device, kernels(family, R)[0]), "down": counted(device, kernels(family, R)[1])}


def kernels(family: str, R: int) -> tuple[Kernel, Kernel]:
    rows = 1 if R == 1 else 8
    return (GATE_UP_MMA, DOWN_MMA) if family == "prefill" else (GATE_UP["bf16", rows], DOWN["bf16", rows])


def total(found: dict[str, dict[str, int]]) -> int:
    return sum(a["bytes"] for a in found.values())


@pytest.mark.parametrize("mounted", [1, 2])
@pytest.mark.parametrize("family, R", [("step", 1), ("step", 4), ("prefill", 64)])
def test_what_mounting_adds(count_device: Device, family: str, R: int, mounted: int) -> None:
    """Five bytes an octet of down rows and sidecar, of each distinct expert in a step; nothing anywhere else."""
    E, F, D = 5, 2304, 64
    picks = (
        np.array([[3, 0]] * R, np.int32)
        if family == "prefill"
        else np.array([[3, 0], [1, 3], [3, 1], [4, 3]][:R], np.int32)
    )
    ew = place_experts(count_device, random_blob(E, F, D, 4096), E, F, D, 10.0)
    both = [placed(count_device, lattice(E, D, seed)) for seed in (1, 2)][:mounted] + [None]
    on = ExpertWeights(**{**vars(ew), "domain": both[0], "post": both[1] if mounted == 2 else None})
    plain, more = run(count_device, family, ew, picks), run(count_device, family, on, picks)
    assert more["up"] == plain["up"]
    assert {name: a for name, a in more["down"].items() if name not in NAMES} == plain["down"]
    added = {name: a["bytes"] for name, a in more["down"].items() if name in NAMES}
    per_octet = 5 if family == "step" else 8 * 5  # on tensor cores four warps ask, each once for eight slots
    assert sum(added.values()) == total(more["down"]) - total(plain["down"])
    assert sum(added.values()) == mounted * len(np.unique(picks)) * (D // 8) * per_octet
    row, axes = kernels(family, R)[1], {"k": 2, "F": F, "D": D, "n_codes": 4096, "mounted": mounted}
    blocks = _blocks(plain["down"])
    if family == "step" and R == 1:
        check_formula(more["down"], row, blocks=blocks, **axes)
    else:
        check_formula(more["down"], row, R=R, blocks=blocks, n_items=len(np.unique(picks)), **axes)


def _blocks(found: dict[str, dict[str, int]]) -> int:
    """From the copies of the codebook."""
    return found["codebook"]["bytes"] // (8 * 4096)


def test_a_mounted_bias(count_device: Device) -> None:
    R, E, k = 3, 384, 6
    u, bias = (count_device.upload(np.zeros(shape, np.float32)) for shape in ((R, E), (E,)))
    picks, weights = count_device.empty((R, k), "i32"), count_device.empty((R, k), "f32")
    config: Any = type("C", (), {"gate_temp": 1.0, "routed_scaling_factor": 1.0, "norm_topk_prob": True})
    route(count_device, Workspace(count_device), u, bias, picks, weights, R, config, bias)
    check_formula(counted(count_device, ROUTE), ROUTE, R=R, E=E, k=k, mounted=1)


def test_share_of_a_released_token() -> None:
    """All layers with factors and biases, against every stored byte that a token reads: about 0.01 %."""
    c = ModelConfig.load(PUBLISHED)
    k, D, E, L = c.num_experts_per_tok, c.hidden_size, c.n_routed_experts, c.num_hidden_layers
    added = L * (k * D * 17 // 32 + 4 * E)
    blobs = dense = 0
    for t in plan(c):
        if t.kind == "blob" and t.name.startswith("blk."):
            blobs += t.nbytes
        elif not t.name.startswith(("mtp.", "v.", "engram.", "token_embd")):
            dense += t.nbytes
    share = added / (dense + blobs * k // E)
    assert added == 714_240
    assert 0.5e-4 < share < 2e-4, share
