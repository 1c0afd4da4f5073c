"""What a domain's sidecar is worth, on its own text and on others': every sidecar read on every judge text.

    python bench/sidecars.py [--gains norm,ls,rms] [--domains all] [--judges all] [--way best] [--fit 8192]
                             [--tokens 8192] [--sidecars DIR] [--out DIR]

Bases of the embedded model are made by each rule for row gains; on each, a sidecar a domain is solved on --fit tokens
of its fit slice and half as many beside it (`ds4 solve sidecar`), and each judge text is read by the base and by the
base with each sidecar (`ds4 ruler run`). What is there already is used, so an interrupted run goes on.
--sidecars DIR: folders to use for the base that ships, instead of solving.

Printed a rule: Sigma-min and KL of the base; what each sidecar changes on each text, with the standard error of the
paired difference; the text's own sidecar against the best of the others; and which share of the own gain the others
give on average: that much is no matter of the domain.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from embedded import embedded_base

from ds4 import embedded
from ds4.cli import main as cli
from ds4.settings import device_settings
from rulers.compare import compare
from rulers.identity import file_mark, folder_mark
from rulers.reading import Reading

ALL = embedded.domains()


def ds4(*argv: object) -> None:
    """One `ds4` command, its table dropped.

    Raises:
        SystemExit: it failed; what it said is on stderr.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.run([str(a) for a in argv])
    if code:
        raise SystemExit(code)


class Work:
    """Sidecars and readings of one base, kept in a folder."""

    def __init__(self, gain: str, args: argparse.Namespace) -> None:
        self.gain, self.args = gain, args
        self.base, self.engram = embedded_base(replace(embedded.recipe(), gain=gain))
        self.model = ["-m", self.base, "--engram-dir", self.engram]
        self.folder = Path(args.out) / f"{gain}-{file_mark(self.base)}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def sidecar(self, domain: str) -> Path:
        if self.args.sidecars is not None and self.gain == embedded.recipe().gain:
            return Path(self.args.sidecars) / domain
        out = self.folder / f"{domain}-{self.args.way}-{self.args.fit}"
        ds4(
            "solve", "sidecar", *self.model, "--domain", domain, "--tokens", self.args.fit,
            "--beside-tokens", self.args.fit // 2, "--way", self.args.way, "-o", out,
        )  # fmt: skip
        return out

    def reading(self, judge: str, sidecar: Path | None) -> Reading:
        mark = "base" if sidecar is None else f"{sidecar.name}-{folder_mark(sidecar)}"
        out = self.folder / f"{judge}-{self.args.tokens}-{mark}.npz"
        if not out.exists():
            mounted = [] if sidecar is None else ["--zchain", sidecar]
            ds4(
                "ruler", "run", *self.model, *mounted, "--domain", judge, "--tokens", self.args.tokens,
                "--floor-tokens", 0, "-o", out,
            )  # fmt: skip
        return Reading.load(out)


def measure(work: Work) -> dict[str, Any]:
    """Every figure of one rule, printed as it is known."""
    sidecars = {d: work.sidecar(d) for d in work.args.domains}
    texts: dict[str, Any] = {}
    for judge in work.args.judges:
        base = work.reading(judge, None)
        found = {d: work.reading(judge, folder) for d, folder in sidecars.items()}
        gains = {d: compare(base, r).difference for d, r in found.items()}
        entry: dict[str, Any] = {"base": base.numbers.to_json(), "gains": {d: g.to_json() for d, g in gains.items()}}
        b = base.numbers
        print(f"\n{work.gain}, {judge}: Sigma-min {b.sigma_min.value:.4f}, KL {b.kl.value:.4f}, {b.tokens} tokens")
        for d, g in sorted(gains.items(), key=lambda item: -item[1].sigma_min.value):
            own = "  <- its own" if d == judge else ""
            print(f"  {d:9} Sigma-min {_pm(g.sigma_min)}  KL {_pm(g.kl)} ({g.kl.value / b.kl.value:+.1%}){own}")
        others = [d for d in found if d != judge]
        if judge in found and others:
            best = max(others, key=lambda d: gains[d].sigma_min.value)
            over = compare(found[best], found[judge]).difference
            generic = float(np.mean([gains[d].sigma_min.value for d in others]) / gains[judge].sigma_min.value)
            entry |= {"best_other": best, "own_over_best_other": over.to_json(), "generic_share": generic}
            print(
                f"  its own over the best other ({best}): Sigma-min {_pm(over.sigma_min)}, KL {_pm(over.kl)}; others "
                f"give {generic:.0%} of its gain"
            )
        sys.stdout.flush()
        texts[judge] = entry
    return texts


def _pm(mean: Any) -> str:
    return f"{mean.value:+.4f} +- {mean.se:.4f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Read every sidecar on every judge text, by row gain rule.")
    names = lambda text: ALL if text == "all" else tuple(text.split(","))  # noqa: E731
    p.add_argument("--gains", type=lambda t: tuple(t.split(",")), default=(embedded.recipe().gain,))
    p.add_argument("--domains", type=names, default=ALL)
    p.add_argument("--judges", type=names, default=ALL)
    p.add_argument("--way", default="best")
    p.add_argument("--fit", type=int, default=8192)
    p.add_argument("--tokens", type=int, default=8192)
    p.add_argument("--sidecars")
    p.add_argument("--out", default=str(device_settings().cache / "bench" / "sidecars"))
    args = p.parse_args(argv)
    unknown = sorted({*args.domains, *args.judges} - {*ALL})
    if unknown:
        p.error(f"no domain {', '.join(unknown)}; there are {', '.join(ALL)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    out = {gain: measure(Work(gain, args)) for gain in args.gains}
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
