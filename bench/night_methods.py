"""How the test bed's tables are solved: the margin solve on one day and on all days, a refit, both, and carry.py."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from night_places import Bed, Day
from night_requests import day_of
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.cli import main as cli
from ds4.sidecar.files import read_gains
from solvers.carry import Carry, TextPlaces
from solvers.last_layer import Head, Places
from solvers.margin_rows import MarginRows, direction
from solvers.margins import MarginRule, solve_margins

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
OTHERS = 1500  # decisions that a margin solve keeps, evenly over all that there are
RULE = MarginRule(tau=0.5, lam=1.0)  # a night's own (NightRule)


def margins_table(
    points: Places,
    a_P: I64,
    others: TextPlaces,
    head: Head,
    n_experts: int,
    rounds: int,
    start_ED: F32 | None = None,
) -> F32:
    """solvers/posttrain.py's rounds, with the real forward done by hand: solve, look what leads now, take it among
    the rivals, solve again; the table under which most decisions are as wanted.
    """
    if len(others.places) > OTHERS:
        which = np.zeros(len(others.places), bool)
        which[np.linspace(0, len(which) - 1, OTHERS).round().astype(int)] = True
        others = others.take(which)
    places = Places.join([points, others.places])
    a_N = np.concatenate([a_P, others.logits_PV.argmax(axis=1)])
    point_N = np.arange(len(a_N)) < len(a_P)
    first_ED = np.ones((n_experts, places.h_PD.shape[1]), np.float32) if start_ED is None else start_ED
    s_ED, best, best_right = first_ED, first_ED, -1
    at: list[int] = []
    b: list[int] = []
    keep: list[float] = []
    with Workers(2) as workers:
        for number in range(rounds + 1):
            h_PD = places.moved(s_ED.astype(np.float64) - 1)
            logits_NV = head.logits(h_PD)
            own_N, rivals_NV = logits_NV[np.arange(len(a_N)), a_N], logits_NV.copy()
            rivals_NV[np.arange(len(a_N)), a_N] = -np.inf
            rival_N = rivals_NV.argmax(axis=1)
            lead_N = own_N - rivals_NV.max(axis=1)
            right = int((lead_N > 0).sum())
            if number and right > best_right:
                best, best_right = s_ED, right
            if number == rounds or (number and right == len(a_N)):
                break
            known = set(zip(at, b, strict=True))
            for i in np.flatnonzero(lead_N <= 0).tolist() if number else range(len(a_N)):
                if (i, int(rival_N[i])) not in known:
                    at.append(i)
                    b.append(int(rival_N[i]))
                    keep.append(float(lead_N[i]) if not number else 0.1)
            at_M, b_M = np.array(at), np.array(b)
            one_M1 = np.ones((len(at_M), 1))
            g_MD = direction(
                head.rows_VD[a_N[at_M]], head.rows_VD[b_M], head.norm_D, places.reach_P[at_M][:, None], one_M1,
                head.factor(h_PD)[at_M, 0],
            )  # fmt: skip
            rows = MarginRows(
                places.y_PKD,
                places.picks_PK,
                at_M,
                g_MD,
                own_N[at_M] - logits_NV[at_M, b_M],
                point_N[at_M],
                n_experts,
            )
            s_ED = solve_margins(rows, RULE, s_ED, workers, np.array(keep), first_ED).s_ED
    return best


def refit_table(bed: Bed, zchain: Path | None, number: int, base: Path, engram: Path, shape: tuple[int, int]) -> F32:
    """The last layer refitted on a day's requests and as much English beside (`ds4 posttrain refit`)."""
    out = bed.folder / f"refit-{number:02d}"
    argv = [
        "posttrain", "refit", "--log", bed.log, "--day", day_of(number), "-m", base, "--engram-dir", engram,
        "-o", out, "--layers", "last", "--tokens", 2048, "--length", 256, "--beside", "general",
        "--beside-tokens", 2048,
        *(["--zchain", zchain] if zchain is not None else []),
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.run([str(a) for a in argv])
    if code:
        raise SystemExit(f"ds4 posttrain refit: {said.getvalue()}")
    path = out / f"gr_L{bed.engine.config.num_hidden_layers - 1:02d}.bin"
    return read_gains(path, *shape) if path.exists() else np.ones(shape, np.float32)


def others_of(days: Sequence[Day]) -> TextPlaces:
    """The other decisions of some days, as they are to stay."""
    found = [d.others for d in days]
    return TextPlaces(
        Places.join([o.places for o in found]), np.concatenate([o.logits_PV for o in found]), None,
        np.arange(sum(len(o.places) for o in found)),
    )  # fmt: skip


def points_of(days: Sequence[Day]) -> tuple[Places, I64]:
    return Places.join([d.points.places for d in days]), np.concatenate([d.a_P for d in days])


def carry_table(carry: Carry, days: Sequence[Day]) -> tuple[F32, int | None]:
    """carry.py on all days; how many steps it took."""
    found = carry.solve(*points_of(days), [others_of(days)])
    return found.s_ED, found.taken
