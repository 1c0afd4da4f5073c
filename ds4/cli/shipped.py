"""The sidecars that ds4 comes with: made, made again and compared, and read. Run in a source tree.

    python -m ds4.cli.shipped make    [--domain NAME]...    those of sidecars/ that are not there, by recipe.toml
    python -m ds4.cli.shipped check   [--domain NAME]...    make them again elsewhere and compare them
    python -m ds4.cli.shipped figures [--domain NAME]...    read them into figures.json and README.md

`check` compares bytes. On another kind of CPU sums round otherwise and a gain may fall on the neighbouring value of
its lattice; then the sidecar that was made again is read by the ruler, and its five figures on the domain's judge
slice must be those of figures.json, each to a tenth of its standard error. The kind of CPU is told by the kernels
that BLAS chose (`made_with` in figures.json), so `figures` belongs on the machine that made them. Readings are kept
in --readings, under names that say what was read, and used again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.cli import main as cli
from ds4.cli.domain import MANIFEST, SHIPPED, read_shipped, shipped
from ds4.cli.embedded_base import embedded_base
from ds4.cli.processes import write_file
from ds4.errors import Ds4Error, FileFormatError, UsageError
from ds4.settings import device_settings
from ds4.work.tasks import blas_kind
from rulers.compare import compare
from rulers.identity import file_mark, folder_mark
from rulers.reading import Reading

RECIPE, FIGURES, PAGE = "recipe.toml", "figures.json", "README.md"
BEGIN, END = "<!-- figures: python -m ds4.cli.shipped figures -->", "<!-- end of figures -->"
PARTS = {  # of recipe.toml: what each says, and of which kind
    "solve": {"way": str, "tokens": int, "length": int, "beside": str, "beside_tokens": int},
    "read": {"tokens": int, "length": int},
}
TOLERANCE = 0.1  # of a standard error: figures that agree so far say the same of the text
NAMED = (("same_top1", "mean"), ("sigma_min", "mean"), ("kl", "mean"), ("ppl_ratio", "value"))
SPREAD = (("sigma_min", "median"), ("sigma_min", "p5"))


@dataclass(frozen=True)
class Recipe:
    """recipe.toml: `solve` are flags of `ds4 solve sidecar`, `read` of `ds4 ruler run`."""

    solve: Mapping[str, Any]
    read: Mapping[str, Any]

    @staticmethod
    def load(path: Path) -> Recipe:
        """
        Raises:
            FileFormatError: it cannot be read, or says more, less or something else than PARTS.
        """
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise FileFormatError(f"{path}: cannot be read ({e})") from e
        if {name: {k: type(v) for k, v in part.items()} for name, part in raw.items()} != PARTS:
            raise FileFormatError(f"{path}: says {raw}; expected {', '.join(PARTS)} with their flags")
        return Recipe(raw["solve"], raw["read"])


def flags(values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]


def solve(recipe: Recipe, name: str, out: Path) -> None:
    """`ds4 solve sidecar` by the recipe, for the embedded model.

    Raises:
        Ds4Error: it cannot be solved.
    """
    _ds4(["solve", "sidecar", "--domain", name, *flags(recipe.solve), "-o", str(out)])


def reading(recipe: Recipe, judge: str, sidecar: Path | None, folder: Path) -> Reading:
    """What a ruler reads in a judge slice with a sidecar or without; measured if `folder` does not have it.

    Raises:
        Ds4Error: it cannot be measured.
        FileFormatError: what is kept is broken, or no reading of this text.
    """
    mark = "base" if sidecar is None else f"{sidecar.name}-{folder_mark(sidecar)}"
    out = folder / f"{judge}-{recipe.read['tokens']}-{mark}.npz"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        mounted = [] if sidecar is None else ["--zchain", str(sidecar)]
        _ds4(
            ["ruler", "run", "--domain", judge, *flags(recipe.read), *mounted, "--floor-tokens", "0", "-o", str(out)]
        )  # fmt: skip
    found = Reading.load(out)
    base = embedded_base()
    what = found.ours.domain, found.ours.split, found.ours.length, found.ours.weights
    weights = f"{base.name} {file_mark(base)}"
    if sidecar is not None:
        weights += f" + zchain {sidecar.name} {folder_mark(sidecar)}"
    want = judge, "judge", recipe.read["length"], weights
    if what != want:
        raise FileFormatError(f"{out}: is a reading of {what}, not of {want}; remove it")
    return found


def _ds4(words: Sequence[str]) -> None:
    """A command in this process, its table dropped.

    Raises:
        Ds4Error: it failed; what it said is on standard error.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(words)
    if code:
        raise Ds4Error(f"ds4 {' '.join(words)} ended with {code}; the lines above say why")


def figures_of(recipe: Recipe, sidecar: Path, readings: Path) -> dict[str, Any]:
    """A domain's entry in figures.json: base and base with sidecar on its own text, their paired difference, and that
    on the text of `beside`.
    """
    name, beside = sidecar.name, recipe.solve["beside"]
    base, ours = (reading(recipe, name, folder, readings) for folder in (None, sidecar))
    other = [reading(recipe, beside, folder, readings) for folder in (None, sidecar)]
    return {
        "fingerprint": json.loads((sidecar / MANIFEST).read_bytes())["fingerprint"],
        "made_with": blas_kind(),
        "base": base.numbers.to_json(),
        "with": ours.numbers.to_json(),
        "difference": compare(base, ours).difference.to_json(),
        "beside": compare(other[0], other[1]).difference.to_json(),
    }


def strays(told: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Which of the five figures differ by more than a tenth of their standard error, a line each; `told` and `found`
    are `Numbers.to_json`'s. Median and p5 of Sigma-min have none of their own: the mean's is taken.
    """
    out = []
    if told["tokens"] != found["tokens"]:
        out.append(f"{found['tokens']} tokens were read, {told['tokens']} are told of")
    for figure, part in (*NAMED, *SPREAD):
        a, b, se = told[figure][part], found[figure][part], told[figure]["se"]
        if not abs(a - b) <= TOLERANCE * se:
            out.append(f"{figure} {part} is {b:.6f}, told is {a:.6f}, standard error {se:.6f}")
    return out


def table(figures: Mapping[str, Any]) -> str:
    """figures.json's domains as Markdown: base and sidecar, and the paired difference with its standard error."""
    tokens, length = (figures["read"][name] for name in ("tokens", "length"))
    lines = [
        f"Judge slices, about {tokens:,} tokens in windows of {length}: base → base with sidecar, in brackets the "
        "standard error\nof the paired difference. Last: what the sidecar changes on the judge slice of "
        f"{figures['beside']}.",
        "",
        f"| domain | Sigma-min | same top-1 | KL | PPL ratio | {figures['beside']}: Sigma-min | KL |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, entry in sorted(figures["domains"].items()):
        cells = []
        for f, p in (NAMED[1], NAMED[0], NAMED[2], NAMED[3]):
            before, after, difference = (entry[side][f] for side in ("base", "with", "difference"))
            cells.append(f"{before[p]:.4f} → {after[p]:.4f} ({difference['se']:.4f})")
        cells += [f"{entry['beside'][f]['mean']:+.4f} ({entry['beside'][f]['se']:.4f})" for f in ("sigma_min", "kl")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text: str, figures: Mapping[str, Any]) -> str:
    """README.md with the table of `figures` between its two marks.

    Raises:
        FileFormatError: the marks are not there.
    """
    head, begun, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not begun or not ended:
        raise FileFormatError(f"{PAGE}: has no {BEGIN!r} followed by {END!r}")
    return f"{head}{BEGIN}\n{table(figures)}\n{END}{tail}"


def differing(ours: Path, theirs: Path) -> str | None:
    """The first file by name that one folder lacks or has other bytes of; None if there is none."""
    a, b = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (ours, theirs))
    return next((name for name in sorted({*a, *b}) if a.get(name) != b.get(name)), None)


def make(home: Path, names: Sequence[str]) -> int:
    recipe = Recipe.load(home / RECIPE)
    for name in names:
        if (home / name).exists():
            print(f"{name}: is there; to make it anew remove {home / name} first")
        else:
            solve(recipe, name, home / name)
            print(f"{name}: made")
    return 0


def check(home: Path, names: Sequence[str]) -> int:
    """0 if every sidecar is reproduced: byte for byte, or on another kind of CPU in its five figures."""
    recipe, bad = Recipe.load(home / RECIPE), 0
    for name in names:
        read_shipped(home / name)
        with tempfile.TemporaryDirectory(prefix="ds4-shipped-") as temporary:
            made = Path(temporary) / name
            solve(recipe, name, made)
            file = differing(home / name, made)
            if file is None:
                print(f"{name}: the same bytes", flush=True)
                continue
            told = load_figures(home)["domains"].get(name)
            if told is None:
                raise FileFormatError(f"{home / FIGURES}: has no figures of {name} to compare with")
            if told["made_with"] == blas_kind():
                print(f"{name}: {file} has other bytes, made with {blas_kind()} as those here were", flush=True)
                bad += 1
                continue
            print(f"{name}: {file} has other bytes; reading what was made", flush=True)
            wrong = strays(told["with"], reading(recipe, name, made, Path(temporary)).numbers.to_json())
        bad += bool(wrong)
        print(f"{name}: {'; '.join(wrong) if wrong else 'the same five figures'}", flush=True)
    return 1 if bad else 0


def load_figures(home: Path) -> dict[str, Any]:
    """
    Raises:
        FileFormatError: figures.json cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads((home / FIGURES).read_bytes())
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{home / FIGURES}: cannot be read ({e})") from e
    return found


def write_figures(home: Path, names: Sequence[str], readings: Path) -> int:
    """Read `names` and write them into figures.json, those of others kept, and into the page."""
    recipe = Recipe.load(home / RECIPE)
    figures: dict[str, Any] = load_figures(home) if (home / FIGURES).exists() else {"domains": {}}
    figures |= {"read": dict(recipe.read), "beside": recipe.solve["beside"]}
    for name in names:
        read_shipped(home / name)
        figures["domains"][name] = figures_of(recipe, home / name, readings)
        write_file(home / FIGURES, json.dumps(figures, indent=1, sort_keys=True) + "\n", 0o644)
        write_file(home / PAGE, page((home / PAGE).read_text(encoding="utf-8"), figures), 0o644)
        print(f"{name}: read", flush=True)
    return 0


def run(argv: Sequence[str]) -> int:
    """The whole command.

    Raises:
        UsageError, Ds4Error: for one message and an exit code.
    """
    p = argparse.ArgumentParser(prog="python -m ds4.cli.shipped", description="The sidecars that ds4 comes with.")
    p.add_argument("action", choices=("make", "check", "figures"))
    p.add_argument("--domain", action="append", metavar="NAME", help="only this one; may be repeated (default: all)")
    p.add_argument("--sidecars", type=Path, default=SHIPPED, metavar="DIR", help="default: the checkout's sidecars/")
    p.add_argument("--readings", type=Path, metavar="DIR", help="where readings are kept (default: in the cache)")
    args = p.parse_args(argv)
    if not (args.sidecars / RECIPE).is_file():
        raise UsageError(f"{args.sidecars}: has no {RECIPE}; run this in a source tree, or give --sidecars DIR")
    there = embedded.domains() if args.action == "make" else shipped(args.sidecars)
    for name in args.domain or ():
        if name not in there:
            raise UsageError(f"--domain {name}: is not there; there are {', '.join(there) or 'none'}")
    names = args.domain or there
    if args.action == "make":
        return make(args.sidecars, names)
    if args.action == "check":
        return check(args.sidecars, names)
    return write_figures(args.sidecars, names, args.readings or device_settings().cache / "shipped")


if __name__ == "__main__":
    sys.exit(cli.guarded(lambda: run(sys.argv[1:])))
