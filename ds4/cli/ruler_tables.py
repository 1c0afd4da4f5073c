"""What `ds4 ruler` prints for people."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rulers.compare import Comparison
from rulers.endings import REASONS, Endings
from rulers.numbers import Mean, Numbers, clustered_mean
from rulers.reading import Reading


def print_reading(reading: Reading) -> None:
    """The numbers and the A/A floor as a table."""
    n, floor = reading.numbers, reading.floor
    table = Table("", "value", "A/A floor")
    against = rows_of(floor.numbers) if floor is not None else [(name, "-") for name, _ in rows_of(n)]
    for (name, value), (_, other) in zip(rows_of(n), against):
        table.add_row(name, value, other)
    console = Console()
    console.print(table)
    print(
        f"{reading.ours.domain}, {reading.ours.split}: {n.tokens} tokens of {n.documents} documents by "
        f"{reading.ours.path}, {reading.ours.weights} against {reading.teacher.weights}"
    )
    print(_about_floor(None if floor is None else floor.numbers))
    for layer, row in enumerate(reading.same_experts):
        share = clustered_mean(row.astype(np.float64), reading.documents)
        print(f"layer {layer}: the original's experts at {with_error(share)} of the positions")


def print_comparison(found: Comparison) -> None:
    """Both sides, their paired difference, and the floors."""
    floors = [f.numbers for f in (found.floor_a, found.floor_b) if f is not None]
    floor = floors[0] if floors else None
    table = Table("", "A", "B", "B - A, paired", "A/A floor")
    columns = [rows_of(x) for x in (found.a, found.b, found.difference)]
    columns.append(rows_of(floor) if floor is not None else [(name, "-") for name, _ in columns[0]])
    for cells in zip(*columns):
        table.add_row(cells[0][0], *(value for _, value in cells))
    Console().print(table)
    print(
        f"{found.domain}: {found.difference.tokens} tokens of {found.difference.documents} documents; A by "
        f"{found.path_a}, B by {found.path_b}; median and p5 of the difference are those of the differences; the PPL "
        "ratio of the difference is B's perplexity over A's"
    )
    print(_about_floor(floor))


def rows_of(n: Numbers) -> list[tuple[str, str]]:
    """Name and value of every number."""
    return [
        ("same top-1", with_error(n.same_top1)),
        ("Sigma-min", with_error(n.sigma_min)),
        ("  median", f"{n.sigma_min_median:.4f}"),
        ("  p5", f"{n.sigma_min_p5:.4f}"),
        ("KL, nats", with_error(n.kl)),
        ("PPL ratio", with_error(n.ppl_ratio)),
    ]


def with_error(m: Mean) -> str:
    """A value and its standard error, `?` where there is none."""
    return f"{m.value:.4f} ± {'?' if m.se is None else f'{m.se:.4f}'}"


def _about_floor(floor: Numbers | None) -> str:
    if floor is None:
        return "A/A floor: not measured (--floor-tokens)"
    return (
        f"A/A floor: the same weights by the other path minus by this one, {floor.tokens} tokens of "
        f"{floor.documents} documents"
    )


def print_endings(got: Endings) -> None:
    """A line an answer, then the shares."""
    table = Table("prompt", "end", "tokens", "period of its loop", "thinking closed")
    for a in got.answers:
        closed = "-" if a.closed is None else "yes" if a.closed else "no"
        table.add_row(escape(a.prompt), a.reason, str(a.tokens), str(a.period or "-"), closed)
    Console().print(table)
    for reason in REASONS:
        print(f"{reason}: {with_error(got.share(reason))}")
    if got.closed is not None:
        print(f"thinking closed: {with_error(got.closed)}")
