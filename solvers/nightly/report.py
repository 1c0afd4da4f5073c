"""A night's page: report.md for a repository, report.json for programs, report.html, which fetches nothing and runs
no script. All three are made from one value, the JSON's.

No text of a request stands in it: a request is named by its id, and a line that speaks of one (the tokens that were
wanted and given are its text) carries the SHA-256 of what was said in it too, so that `ds4 forget` finds the line and
takes it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ds4.posttrain.log import replace_file

FILES = ("report.md", "report.json", "report.html")
_STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#1a202c;background:#fff}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #cbd5e0;padding:.25em .6em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}tr.bad td{background:#fed7d7}tr.good td:first-child{color:#276749}"
)


@dataclass(frozen=True)
class Row:
    """Cells of a table. `marks`: digests of what the line speaks of; `kind`: "good", "bad" or neither."""

    cells: tuple[str, ...]
    marks: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class Part:
    """A heading, sentences under it, and a table."""

    title: str
    texts: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()


def write(folder: Path, told: Mapping[str, Any]) -> None:
    """The three files, each whole or not at all.

    Raises:
        CapacityError: the disk is full. Ds4Error: they cannot be written.
    """
    parts = pages(told)
    texts = (markdown(parts), json.dumps(told, indent=1, ensure_ascii=False) + "\n", html(parts))
    for name, text in zip(FILES, texts, strict=True):
        replace_file(folder / name, text.encode("utf-8", "backslashreplace"))


def pages(told: Mapping[str, Any]) -> list[Part]:
    """What the page says, in order."""
    parts = [_summary(told), _gates(told), _points(told), _carried(told), _rulers(told), _input(told), _time(told)]
    return [p for p in parts if p.texts or p.rows]


def _summary(told: Mapping[str, Any]) -> Part:
    event, mounted = told["event"], told["before"] or "nothing"
    lines = [
        f"Method {told['method']}, the log's days {told['days'][0]} to {told['days'][1]}, base {told['base']}, "
        f"sidecar {told['sidecar']}, original {told['teacher'] or 'none: what needs it was left out'}."
    ]
    if event == "accepted":
        lines.append(f"{told['chosen']} passed its gates and is mounted as {told['name']}; before it: {mounted}.")
    else:
        lines.append(f"No candidate passed; what is mounted stays: {mounted}.")
    lines += [f"{c['name']} ({c['placed']}): {c['why'] or 'passed'}" for c in told["candidates"]]
    lines += [str(note) for note in told.get("notes", ())]
    return Part(f"Night of {told['day']}: {event}", tuple(lines))


def _gates(told: Mapping[str, Any]) -> Part:
    rows = []
    for c in told["candidates"]:
        for v in c["verdicts"]:
            word = {True: "passed", False: "failed", None: "left out"}[v["passed"]]
            kind = {True: "good", False: "bad", None: ""}[v["passed"]]
            cells = (c["name"], v["gate"], word, _number(v["measured"]), _number(v["threshold"]), v["reason"])
            rows.append(Row(cells, kind=kind))
    head = ("candidate", "gate", "", "measured", "threshold", "reason")
    note = "Measured against the base with its sidecar alone; Sigma-min and KL are differences, with minus without."
    return Part("Gates", (note,) if rows else (), head, tuple(rows))


def _points(told: Mapping[str, Any]) -> Part:
    points, names = told["points"], [c["name"] for c in told["candidates"] if c["trained"] is not None]
    if not points:
        return Part("Points")
    texts = [f"{sum(p['before'] > 0 for p in points)} of {len(points)} points are right without a candidate."]
    for c in told["candidates"]:
        if c["trained"] is not None:
            right, said = c["trained"]["right"], c["answers"]
            texts.append(
                f"{c['name']}: {right} of {len(points)} are right; drawn freely, {said['said']} of {said['points']} "
                f"answers to their prompts have the wanted token in its place, {told['said']['said']} without it."
            )
    rows = tuple(
        Row(
            (
                p["request_id"] or f"line {p['line']}", str(p["position"]), f"{p['token_a']} before {p['token_b']}",
                f"{p['before']:+.3f}",
                *(f"{p['leads'][name]:+.3f}" for name in names),
            ),
            tuple(p["texts_sha256"].split()),
            "bad" if p["before"] <= 0 else "",
        )
        for p in points
    )  # fmt: skip
    return Part("Points", tuple(texts), ("request", "place", "wanted", "lead before", *names), rows)


def _carried(told: Mapping[str, Any]) -> Part:
    rows = []
    for name, held in told["held_out"].items():
        gain, se = held["margin_gain"]["mean"], held["margin_gain"]["se"]
        right = (str(held["right_before"]), str(held["right_after"]))
        rows.append(Row((name, str(held["points"]), *right, f"{gain:+.3f} ± {'?' if se is None else f'{se:.3f}'}")))
    if not rows:
        return Part("Held-out points")
    note = (
        "The day's own points, each candidate solved once more without them, on the earlier days' alone (refit never "
        "sees what was wanted); `mounted` is what the night before left."
    )
    return Part("Held-out points", (note,), ("", "points", "right before", "after", "lead gained"), tuple(rows))


def _rulers(told: Mapping[str, Any]) -> Part:
    rows = []
    for c in told["candidates"]:
        for text, d in c["rulers"].items():
            figures = tuple(_mean(d[name]) for name in ("same_top1", "sigma_min", "kl"))
            rows.append(Row((c["name"], text, f"{d['tokens']:,}, {d['documents']}", *figures)))
    head = ("candidate", "text", "tokens, documents", "same top-1", "Sigma-min", "KL, nats")
    return Part("Rulers: with minus without", (), head, tuple(rows))


def _input(told: Mapping[str, Any]) -> Part:
    requests, corrections = told["requests"], told["corrections"]
    texts = [
        f"{requests['day']} requests of the day, {requests['days']} of all days; {corrections['read']} corrections, "
        f"{corrections['of_other_days']} of them of requests of other days; {corrections['decisions']} decisions."
    ]
    if len(corrections["files"]) > 1:
        where = ", ".join(f"{f['file']} from line {f['first_line']}" for f in corrections["files"])
        texts.append(f"Lines of corrections are counted through their files: {where}.")
    rows = [Row((d["file"], str(d["line"]), d["reason"])) for d in requests["damaged"]]
    rows += [Row(("corrections", str(r["line"]), r["reason"])) for r in corrections["reported"]]
    return Part("What it went by", tuple(texts), ("file", "line", "reported"), tuple(rows))


def _time(told: Mapping[str, Any]) -> Part:
    m = told["memory"]
    how = "the server's device was borrowed" if m["borrowed"] else "an engine of its own, beside the server"
    text = f"Memory: {how}; {m['pauses']} pauses, {m['waited_s']:.0f} s of waiting."
    rows = [Row((name, f"{s:.1f}")) for name, s in told["seconds"].items()]
    return Part(
        "Time", (text,), ("step", "seconds"), (*rows, Row(("in all", f"{sum(told['seconds'].values()):.1f}")))
    )


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}" if abs(x) >= 0.01 else f"{x:.5f}"


def _mean(m: Mapping[str, Any]) -> str:
    return f"{m['mean']:+.5f} ± {'?' if m['se'] is None else format(m['se'], '.5f')}"


# -- the two formats --


def markdown(parts: Sequence[Part]) -> str:
    lines: list[str] = []
    for i, part in enumerate(parts):
        lines += [f"{'#' if i == 0 else '##'} {part.title}", ""]
        for text in part.texts:
            lines += [_cell(text), ""]
        if part.rows:
            lines += [_line(part.head), "|" + "---|" * len(part.head)]
            for row in part.rows:
                marks = f" <!-- {' '.join(row.marks)} -->" if row.marks else ""
                lines.append(_line(row.cells) + marks)
            lines.append("")
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def html(parts: Sequence[Part]) -> str:
    out = [
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f"<title>{escape(parts[0].title)}</title>", f"<style>{_STYLE}</style>", "</head>", "<body>",
    ]  # fmt: skip
    for i, part in enumerate(parts):
        level = "h1" if i == 0 else "h2"
        out.append(f"<{level}>{escape(part.title)}</{level}>")
        out += [f"<p>{escape(' '.join(text.split()))}</p>" for text in part.texts]
        if part.rows:
            out += ["<table>", f"<tr>{''.join(f'<th>{escape(c)}</th>' for c in part.head)}</tr>"]
            for row in part.rows:
                kind = f' class="{row.kind}"' if row.kind else ""
                marks = f' title="{" ".join(row.marks)}"' if row.marks else ""
                out.append(f"<tr{kind}{marks}>{''.join(f'<td>{escape(c)}</td>' for c in row.cells)}</tr>")
            out.append("</table>")
    return "\n".join([*out, "</body>", "</html>", ""])
