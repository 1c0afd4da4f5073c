"""What a night's table does on the day after: fourteen days of requests by script, each judged by the next.

    python bench/nights.py [--seed 2] [--chosen 6] [--twice 4] [--days 14] [--methods all]
                           [--zchain sidecars/general] [--work DIR] [--quick]

Night d = 1 .. days - 1 solves the last layer's table of a post-training folder on days 1 to d (night_requests.py),
and the points of day d + 1 judge it. Methods, beside `none`, the sidecar alone:

    margins-day    the margin solve on the day's points alone (solvers/margins.py)
    margins        the margin solve on all days' points: the published method
    refit          the last layer refitted on the day's text against the original (solvers/refit.py)
    refit+margins  all days' points by the margin solve, from the refit on
    carry          all days' points by solvers/carry.py

Printed, a night: trained points right before -> after; held-out points before -> after with the standard error of the
paired difference, subjects being the clusters; other decisions of the next day that keep their strongest token; and
what Sigma-min and KL to the original change by on English that no solve saw, with standard errors by document. The
table is mounted for the held-out points (Engine.remount, the path of requests); the other figures are by hand from
what was read once (solvers/last_layer.py), and `apart` counts held-out decisions that come out otherwise by hand.
Nights that are in the work folder are not solved again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from embedded import ROOT, cache_key, embedded_base
from night_methods import carry_table, margins_table, others_of, points_of, refit_table
from night_places import Bed, Day, note
from night_requests import DAYS, Recurring
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.engine import Engine
from ds4.posttrain.points import score_points
from ds4.settings import device_settings
from ds4.sidecar.files import FINGERPRINT, encode_gains, gain_path
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from rulers.identity import file_mark
from rulers.numbers import Mean, clustered_mean, position_figures
from solvers.carry import Carry, CarryRule, TextPlaces

METHODS = ("none", "margins-day", "margins", "refit", "refit+margins", "carry")
F32 = NDArray[np.float32]
BLOCK = 512


class Nights:
    """The bed, and how a table is judged."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base, self.engram = embedded_base()
        self.zchain = Path(args.zchain) if args.zchain else None
        self.engine = Engine.open(self.base, engram_dir=self.engram, zchain=self.zchain, prefill="replay")
        c = self.engine.config
        self.shape, self.n_layers = (c.n_routed_experts, c.hidden_size), c.num_hidden_layers
        self.mark = format_fingerprint(*sidecar_fingerprint(self.zchain, self.n_layers))
        scripts = [ROOT / "bench" / f"night_{name}.py" for name in ("requests", "subjects")]
        quick = "quick" if args.quick else "whole"
        recurring = Recurring(args.chosen, args.twice)
        key = cache_key("nights", file_mark(self.base), self.mark, str(args.seed), quick, str(recurring), *scripts)
        self.rule = CarryRule(held=2, steps=3, least=-100) if args.quick else CarryRule()
        sizes = (600, 200, 64) if args.quick else (12288, 4096, 256)
        self.bed = Bed(
            self.engine, Path(args.work) / key, args.seed, args.days, 7 if args.quick else None, sizes, self._say,
            recurring,
        )  # fmt: skip
        self.bed.make_log()
        self.days = [self.bed.day(n) for n in range(1, args.days + 1)]
        self.judge = self.bed.text("judge")
        self._before = self._figures(np.ones(self.shape, np.float32))

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @cached_property
    def carry(self) -> Carry:
        return Carry(self.bed.text("fit"), self.bed.head, self.shape[0], self.rule, Workers(2))

    def table(self, method: str, d: int) -> tuple[F32, dict[str, Any]]:
        """The table of night d, and what else is to be said of it."""
        before, rounds = self.days[:d], 1 if self.args.quick else 3
        if method == "none":
            return np.ones(self.shape, np.float32), {}
        if method == "carry":
            s_ED, taken = carry_table(self.carry, before)
            return s_ED, {"steps": taken}
        refitted = (
            refit_table(self.bed, self.zchain, d, self.base, self.engram, self.shape) if "refit" in method else None
        )
        if method == "refit":
            assert refitted is not None
            return refitted, {}
        used = before[-1:] if method == "margins-day" else before
        return margins_table(
            *points_of(used), others_of(used), self.bed.head, self.shape[0], rounds, refitted
        ), {}  # fmt: skip

    def night(self, method: str, d: int) -> dict[str, Any]:
        """Solve and judge, or what an earlier run found."""
        path = self.bed.folder / f"{method}-{d:02d}.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        wall = time.perf_counter()
        s_ED, more = self.table(method, d)
        wall = time.perf_counter() - wall
        found = {"method": method, "day": d, "solve_s": round(wall, 2), **more, **self.judged(s_ED, d)}
        note(path, found)
        return found

    def judged(self, s_ED: F32, d: int) -> dict[str, Any]:
        """Every figure of a table that was solved on days 1 to d."""
        today, tomorrow = self.days[d - 1], self.days[d]
        real_P = self._real(tomorrow, s_ED)
        before_P = tomorrow.points.logits_PV.argmax(axis=1) == tomorrow.a_P
        by_hand_P = self._right(tomorrow, s_ED)
        _, cluster_P = np.unique(tomorrow.subjects, return_inverse=True)
        change = clustered_mean(real_P.astype(np.float64) - before_P, cluster_P)
        others = tomorrow.others
        kept_P = self._logits(others, s_ED).argmax(axis=1) == others.logits_PV.argmax(axis=1)
        trained = [(self._right(x, s_ED), x.points.logits_PV.argmax(axis=1) == x.a_P) for x in self.days[:d]]
        differences = self._figures(s_ED) - self._before
        text = {
            name: _mean(clustered_mean(differences[i], self.judge.documents_P.astype(np.int64)))
            for i, name in enumerate(("same_top1", "sigma_min", "kl"))
        }
        return {
            "points": sum(len(x.a_P) for x in self.days[:d]), "held_out": len(real_P),
            "trained_before": float(np.mean(np.concatenate([b for _, b in trained]))),
            "trained": float(np.mean(np.concatenate([a for a, _ in trained]))),
            "today": float(self._right(today, s_ED).mean()),
            "before": float(before_P.mean()), "after": float(real_P.mean()), "change": _mean(change),
            "up": bool(change.se is not None and change.value > 2 * change.se),
            "apart": int((real_P != by_hand_P).sum()), "kept": float(kept_P.mean()), "general": text,
            "general_held": change_held(text["sigma_min"]),
            "most_moved": float(np.abs(s_ED - 1).max()),
        }  # fmt: skip

    def _real(self, day: Day, s_ED: F32) -> NDArray[np.bool_]:
        """Whether the engine, the table mounted, has each wanted token before all others."""
        with tempfile.TemporaryDirectory(prefix="mounted-", dir=self.bed.folder) as name:
            folder = Path(name)
            gain_path(folder, self.n_layers - 1).write_bytes(encode_gains(s_ED))
            (folder / FINGERPRINT).write_text(self.mark)
            self.engine.remount(self.zchain, folder)
            try:
                points = score_points(day.decisions, self.engine.session)
            finally:
                self.engine.remount(self.zchain, None)
        return np.array([p.margin > 0 for p in points])

    def _right(self, day: Day, s_ED: F32) -> NDArray[np.bool_]:
        return np.asarray(self._logits(day.points, s_ED).argmax(axis=1) == day.a_P)

    def _logits(self, text: TextPlaces, s_ED: F32) -> F32:
        return self.bed.head.logits(text.places.moved(s_ED.astype(np.float64) - 1))

    def _figures(self, s_ED: F32) -> NDArray[np.float64]:
        """same top-1, Sigma-min and KL of every judge position, [3, P]."""
        t = self.judge
        assert t.original_PV is not None
        parts = []
        for first in range(0, len(t.places), BLOCK):
            part = slice(first, first + BLOCK)
            places, original_PV = t.places.take(part), t.original_PV[part]
            ours_PV = self.bed.head.logits(places.moved(s_ED.astype(np.float64) - 1))
            parts.append(position_figures(original_PV, ours_PV, np.zeros(len(ours_PV), np.int64))[:3])
        return np.concatenate(parts, axis=1)


def change_held(sigma_min: dict[str, float | None]) -> bool:
    """Not worse than one standard error."""
    mean, se = sigma_min["mean"], sigma_min["se"]
    return mean is not None and mean >= -(se or 0.0)


def _mean(m: Mean) -> dict[str, float | None]:
    return {"mean": m.value, "se": m.se}


def line(r: dict[str, Any]) -> str:
    g, c = r["general"], r["change"]
    se = float("nan") if c["se"] is None else c["se"]
    text = [f"{g[name]['mean']:+.4f} ({g[name]['se'] or 0:.4f})" for name in ("sigma_min", "kl")]
    return (
        f"| {r['method']} | {r['day']} | {r['trained_before']:.2f} -> {r['trained']:.2f} of {r['points']} | "
        f"{r['before']:.2f} -> {r['after']:.2f}, {c['mean']:+.2f} ({se:.2f}){' *' if r['up'] else ''} | "
        f"{r['kept']:.4f} | {text[0]} | {text[1]} | {r['apart']} | {r['solve_s']:.1f} |"
    )


def summary(method: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A method's nights in one row: counts, and means over nights."""
    out: dict[str, Any] = {
        "method": method, "nights": len(rows), "up": sum(r["up"] for r in rows),
        "up_and_general_held": sum(r["up"] and r["general_held"] for r in rows),
    }  # fmt: skip
    for key in ("trained", "before", "after", "kept"):
        out[key] = float(np.mean([r[key] for r in rows]))
    for key in ("sigma_min", "kl"):
        out[key] = float(np.mean([r["general"][key]["mean"] for r in rows]))
    for key in ("general_held", "apart", "held_out"):
        out[key] = sum(r[key] for r in rows)
    return out


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Judge each night's table by the requests of the day after.")
    p.add_argument("--seed", type=int, default=2)
    p.add_argument("--chosen", type=int, default=Recurring().chosen, help="facts that recur, and as many preferences")
    p.add_argument("--twice", type=int, default=Recurring().twice, help="of all these are asked twice a day")
    p.add_argument("--days", type=int, default=DAYS, help="days of requests; the last one only judges")
    p.add_argument("--methods", type=lambda t: METHODS if t == "all" else tuple(t.split(",")), default=METHODS)
    p.add_argument("--zchain", default=str(ROOT / "sidecars" / "general"), help="the sidecar below; '' for none")
    p.add_argument("--work", default=str(device_settings().cache / "bench" / "nights"))
    p.add_argument(
        "--quick", action="store_true", help="7 requests a day, little text, one round: figures of no meaning"
    )
    args = p.parse_args(argv)
    unknown = sorted({*args.methods} - {*METHODS})
    if unknown:
        p.error(f"no method {', '.join(unknown)}; there are {', '.join(METHODS)}")
    if args.days < 2:
        p.error(f"--days {args.days}: at least two, one to solve on and one to judge by")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    nights = Nights(args)
    for problem in nights.bed.problems:
        print(f"reported: {problem}")
    print("| method | night | trained points | held out | others kept | Sigma-min | KL | apart | solve, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows, sums = [], []
    for method in args.methods:
        mine = []
        for d in range(1, args.days):
            mine.append(nights.night(method, d))
            print(line(mine[-1]), flush=True)
        rows += mine
        sums.append(summary(method, mine))
    print("\n| method | nights up by 2 se | of them general held | trained | held out | kept | Sigma-min | KL |")
    print("|---|---|---|---|---|---|---|---|")
    for s in sums:
        print(
            f"| {s['method']} | {s['up']} of {s['nights']} | {s['up_and_general_held']} | {s['trained']:.2f} | "
            f"{s['before']:.2f} -> {s['after']:.2f} | {s['kept']:.4f} | {s['sigma_min']:+.4f} | {s['kl']:+.4f} |"
        )
    out = {
        "bench": "nights",
        "seed": args.seed,
        "days": args.days,
        "quick": args.quick,
        "nights": rows,
        "methods": sums,
    }
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
