"""A report on readings: Markdown for a repository, JSON for a program, one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from ds4.base.output import write_text
from ds4.errors import Ds4Error, UsageError
from rulers.compare import Comparison, compare
from rulers.numbers import Mean, Numbers, clustered_mean
from rulers.plots import Row, bars, histogram, intervals
from rulers.reading import Reading

FILES = ("report.md", "report.json", "report.html")
HEAD = ("domain", "tokens, documents", "same top-1", "Sigma-min", "median", "p5", "KL, nats", "PPL ratio")
EXPLAINED = (
    "Every figure is the original against the engine, position by position: Sigma-min is the probability mass that "
    "both agree on, KL is KL(original || engine) in nats, the PPL ratio is the engine's perplexity over the "
    "original's. ± is one standard error, clustered by document; ? where one document does not tell it. The A/A "
    "floor is what reading the same weights by the other path changes."
)
DIFFERENCE = (
    "After minus before, paired by position; median and p5 are those of the differences of Sigma-min, the PPL ratio "
    "is perplexity after over before."
)
_STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#1a202c;background:#fff}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #cbd5e0;padding:.25em .6em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}.row{display:flex;flex-wrap:wrap;gap:1em}"
    "svg{max-width:100%;height:auto}"
)


@dataclass(frozen=True)
class Report:
    """Readings, and for those that have one before them, what became of it."""

    readings: tuple[Reading, ...]
    comparisons: tuple[Comparison, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "readings": [r.to_json() for r in self.readings],
            "differences": [c.to_json() for c in self.comparisons],
        }

    def write(self, folder: str | Path) -> list[Path]:
        """report.md, report.json and report.html in `folder`, each whole or not at all.

        Raises:
            Ds4Error: they cannot be written. CapacityError: the disk is full.
        """
        home = Path(folder)
        texts = (markdown(self), json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", html(self))
        try:
            home.mkdir(parents=True, exist_ok=True)
            for name, text in zip(FILES, texts):
                write_text(home / name, text)
        except OSError as e:
            raise Ds4Error(f"{home}: cannot be written ({e.strerror or e})") from e
        return [home / name for name in FILES]


def make(readings: Sequence[tuple[str, Reading]], before: Sequence[tuple[str, Reading]] = ()) -> Report:
    """Of (name, reading), each domain once a side; those of `before` are compared with theirs of the same domain.

    Raises:
        UsageError: no reading, two of one domain, one before without one after, or two that cannot be compared.
    """
    if not readings:
        raise UsageError("a report needs at least one reading")
    sides = []
    for side in (readings, before):
        found: dict[str, tuple[str, Reading]] = {}
        for name, r in side:
            if r.ours.domain in found:
                raise UsageError(f"{found[r.ours.domain][0]} and {name} are both of the domain {r.ours.domain}")
            found[r.ours.domain] = (name, r)
        sides.append(found)
    after, earlier = sides
    lone = sorted(set(earlier) - set(after))
    if lone:
        raise UsageError(f"{earlier[lone[0]][0]}: there is no reading after it of the domain {lone[0]}")
    pairs = [
        compare(earlier[domain][1], after[domain][1], (earlier[domain][0], after[domain][0]))
        for domain in after
        if domain in earlier
    ]
    return Report(tuple(r for _, r in after.values()), tuple(pairs))


def markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = ["# Ruler report", "", EXPLAINED, ""]
    lines += _table(HEAD, [numbers_row(r.ours.domain, r.numbers) for r in report.readings])
    lines += ["## A/A floor", ""]
    lines += _table(HEAD, _floor_rows(report))
    if report.comparisons:
        lines += ["## Difference", "", DIFFERENCE, ""]
        lines += _table(HEAD, [numbers_row(c.domain, c.difference) for c in report.comparisons])
    routed = [r for r in report.readings if len(r.same_experts)]
    if routed:
        lines += ["## Same experts, by layer", "", "Share of positions whose set of experts is the original's.", ""]
        lines += _table(*_routing_table(routed))
    lines += ["## What was read", ""]
    lines += [f"- {line}" for line in _sources(report)]
    return "\n".join(lines) + "\n"


def html(report: Report) -> str:
    """The report as one page: tables and plots, nothing fetched, no script."""
    rows = [Row(r.ours.domain, r.numbers.sigma_min.value, r.numbers.sigma_min.se) for r in report.readings]
    body = ["<h1>Ruler report</h1>", f"<p>{escape(EXPLAINED)}</p>"]
    body.append(_html_table(HEAD, [numbers_row(r.ours.domain, r.numbers) for r in report.readings]))
    body += ["<h2>Domains side by side</h2>", intervals(rows, "Sigma-min, mean ± 2 standard errors")]
    kl = [Row(r.ours.domain, r.numbers.kl.value, r.numbers.kl.se) for r in report.readings]
    body.append(intervals(kl, "KL, nats, mean ± 2 standard errors"))
    body += [
        "<h2>Sigma-min by position</h2>",
        "<p>Share of positions; line: median, dashed: p5.</p>",
        '<div class="row">',
    ]
    body += [histogram(r.figures[1], r.ours.domain) for r in report.readings]
    body.append("</div>")
    if report.comparisons:
        body += ["<h2>Difference</h2>", f"<p>{escape(DIFFERENCE)}</p>"]
        body.append(_html_table(HEAD, [numbers_row(c.domain, c.difference) for c in report.comparisons]))
        moved = [
            Row(c.domain, c.difference.sigma_min.value, c.difference.sigma_min.se) for c in report.comparisons
        ]  # fmt: skip
        body.append(intervals(moved, "Sigma-min, after minus before, ± 2 standard errors", zero=True))
    body += ["<h2>A/A floor</h2>", _html_table(HEAD, _floor_rows(report))]
    routed = [r for r in report.readings if len(r.same_experts)]
    if routed:
        body += ["<h2>Same experts, by layer</h2>", _html_table(*_routing_table(routed))]
        body.append("<p>KL by the first layer that picked other experts than the original's:</p>")
        body += [divergence_plot(r) for r in routed]
    body.append("<h2>What was read</h2><ul>")
    body += [f"<li>{escape(line)}</li>" for line in _sources(report)]
    page = "\n".join([*body, "</ul>"])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Ruler report</title>\n'
        f"<style>{_STYLE}</style></head><body>\n{page}\n</body></html>\n"
    )


def numbers_row(label: str, n: Numbers) -> tuple[str, ...]:
    """Cells under HEAD."""
    return (
        label, f"{n.tokens}, {n.documents}", _cell(n.same_top1), _cell(n.sigma_min), f"{n.sigma_min_median:.4f}",
        f"{n.sigma_min_p5:.4f}", _cell(n.kl), _cell(n.ppl_ratio),
    )  # fmt: skip


def divergence(reading: Reading) -> list[tuple[int | None, int, Mean]]:
    """(first layer whose experts are not the original's, or None; positions; their KL), those that occur."""
    same = reading.same_experts.astype(bool)
    first = np.where(same.all(axis=0), len(same), (~same).argmax(axis=0))
    out: list[tuple[int | None, int, Mean]] = []
    for layer in range(len(same) + 1):
        at = first == layer
        if at.any():
            kl = clustered_mean(reading.figures[2, at], reading.documents[at])
            out.append((layer if layer < len(same) else None, int(at.sum()), kl))
    return out


def divergence_plot(reading: Reading) -> str:
    """KL by layer of first divergence, as bars."""
    found = divergence(reading)
    return bars(
        ["nowhere" if layer is None else f"layer {layer}" for layer, _, _ in found],
        [kl.value for _, _, kl in found],
        [f"{_cell(kl)} ({n} positions)" for _, n, kl in found],
        f"{reading.ours.domain}: mean KL, nats",
    )


def _routing_table(readings: Sequence[Reading]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    n_layers = max(len(r.same_experts) for r in readings)
    rows = [(r.ours.domain, *(f"{row.mean():.3f}" for row in r.same_experts)) for r in readings]
    return ("domain", *(str(i) for i in range(n_layers))), rows


def _floor_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (r.ours.domain, *["not measured"] * (len(HEAD) - 1))
        if r.floor is None
        else numbers_row(r.ours.domain, r.floor.numbers)
        for r in report.readings
    ]


def _sources(report: Report) -> list[str]:
    return [
        f"{r.ours.domain}, {r.ours.split}, windows of at most {r.ours.length} tokens, text {r.text.digest[:12]}: "
        f"{r.ours.weights} ({r.ours.arithmetic}) by {r.ours.path} against {r.teacher.weights} "
        f"({r.teacher.arithmetic}), model {r.ours.model}"
        for r in report.readings
    ]


def _cell(m: Mean) -> str:
    return f"{m.value:.4f} ± {'?' if m.se is None else f'{m.se:.4f}'}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows), ""]


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(r, "td") for r in rows), "</table>"])
