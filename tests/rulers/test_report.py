"""Reports say what the readings say, need nothing but themselves, and are well formed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ds4.errors import UsageError
from rulers.plots import Row, histogram, intervals
from rulers.reading import Reading
from rulers.report import FILES, divergence, make
from tests.rulers.readings import OURS, TEACHER, reading, text


def of_domain(name: str, made: Reading) -> Reading:
    return replace(made, teacher=replace(TEACHER, domain=name), ours=replace(OURS, domain=name))


@pytest.fixture
def written(tmp_path: Path) -> dict[str, str]:
    after = [
        ("a2", of_domain("code", reading(0.2, floor=0.01, experts=3))),
        ("b2", of_domain("<law|&>", reading(0.3))),
    ]
    before = [("a1", of_domain("code", reading(0.5)))]
    paths = make(after, before).write(tmp_path / "new" / "folder")
    assert [p.name for p in paths] == list(FILES)
    return {p.suffix: p.read_text(encoding="utf-8") for p in paths}


def test_json_is_the_readings(written: dict[str, str]) -> None:
    told = json.loads(written[".json"])
    made = of_domain("code", reading(0.2, floor=0.01, experts=3))
    first = told["readings"][0]
    assert {k: first[k] for k in made.to_json()} == json.loads(json.dumps(made.to_json()))
    assert [layer["layer"] for layer in first["routing"]] == [0, 1, 2] and told["readings"][1]["routing"] is None
    assert first["routing"][1]["same_experts"]["mean"] == pytest.approx(made.same_experts[1].mean())
    (difference,) = told["differences"]
    assert difference["domain"] == "code" and difference["sigma_min"]["mean"] > 0 > difference["kl"]["mean"]


def test_markdown_has_every_number(written: dict[str, str]) -> None:
    md, n = written[".md"], of_domain("code", reading(0.2)).numbers
    assert f"{n.sigma_min.value:.4f} ± {n.sigma_min.se:.4f}" in md and f"| {n.sigma_min_p5:.4f} |" in md
    assert "not measured" in md and "## Difference" in md and "<law\\|&>" in md
    tables = [line for line in md.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {9, 5}  # HEAD's 8 columns; 1 + 3 layers


class Page(HTMLParser):
    """Tags that open and close in order, and what the page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object", "image", "use"):
            self.fetched.append(tag)
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "style")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_but_itself(written: dict[str, str]) -> None:
    html = written[".html"]
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == [] and page.fetched == [] and "url(" not in html and "@import" not in html
    assert "<law" not in html and "&lt;law|&amp;&gt;" in html
    plots = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(plots) == 2 + 2 + 1 + 1  # Sigma-min and KL, a histogram a domain, the difference, KL by divergence
    for plot in plots:
        ElementTree.fromstring(plot)


def test_a_histogram_shows_the_shares() -> None:
    values = np.array([0.01] * 3 + [0.52] * 6 + [1.0])
    shares = re.findall(r"<title>([\d.]+) to [\d.]+: ([\d.]+)%</title>", histogram(values, "x"))
    assert [(a, s) for a, s in shares if float(s)] == [("0.00", "30.0"), ("0.50", "60.0"), ("0.95", "10.0")]
    bars = re.findall(r'height="([\d.]+)" fill', histogram(values, "x"))
    assert float(bars[0]) == pytest.approx(float(bars[10]) / 2, abs=0.1)
    assert max(map(float, bars)) == 72  # the highest fills the plot, and the axis says what it is
    assert ">60%<" in histogram(values, "x")


def test_intervals_stand_where_the_values_are() -> None:
    drawn = intervals([Row("a", 0.2, 0.01), Row("b", 0.4, None), Row("c", 0.6, 0.02)], "t", zero=True)
    a, b, c = (float(x) for x in re.findall(r'<circle cx="([\d.]+)"', drawn))
    assert b - a == pytest.approx(c - b, abs=0.2) and a < b < c
    assert drawn.count('stroke-width="3"') == 2  # no bar where the error is unknown


def test_divergence_groups_positions_by_first_layer() -> None:
    made = reading(0.2, experts=2)
    same = np.ones((2, made.figures.shape[1]), np.uint8)
    same[1, :10], same[:, 10:15] = 0, 0
    found = divergence(replace(made, same_experts=same))
    assert [(layer, n) for layer, n, _ in found] == [(0, 5), (1, 10), (None, made.figures.shape[1] - 15)]
    assert found[1][2].value == pytest.approx(made.figures[2, :10].mean())


def test_sides_that_do_not_fit_are_refused() -> None:
    a = reading(0.2)
    with pytest.raises(UsageError, match="x and y are both of the domain code"):
        make([("x", a), ("y", a)])
    with pytest.raises(UsageError, match="y: there is no reading after it of the domain law"):
        make([("x", a)], [("y", of_domain("law", a))])
    with pytest.raises(UsageError, match="y and x cannot be compared"):
        make([("x", a)], [("y", reading(0.2, of=text(9)))])
    with pytest.raises(UsageError, match="at least one reading"):
        make([])


def test_zero_is_told_and_no_tick_runs_into_another() -> None:
    for value in (0.015, -0.015, 0.0, 3.0):
        svg = ElementTree.fromstring(intervals([Row("code", value, 0.0015)], "moved", zero=True))
        texts = [e for e in svg if e.tag.endswith("text")]
        bottom = max(float(e.get("y", "0")) for e in texts)
        ticks = sorted((float(e.get("x", "0")), e.text) for e in texts if float(e.get("y", "0")) == bottom)
        assert [t for _, t in ticks].count("0") == 1
        (line,) = [e for e in svg if e.get("stroke") == "#a0aec0"]
        assert {t: x for x, t in ticks}["0"] == float(line.get("x1", "0"))
        assert all(b - a > 36 for (a, _), (b, _) in pairwise(ticks))
