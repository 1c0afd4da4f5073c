"""Legal English: the texts of software licences and notices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from train.packages import Package, members
from train.sources import Source
from train.sources.text import decode

# The licences whose authors let anybody pass their words on: free ones, by the data base's own categories.
FREE = frozenset(["Permissive", "Copyleft", "Copyleft Limited", "Public Domain", "CLA", "Patent License"])
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.S)
SHORTEST_RULE = 600


def licences(free: bool) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """A reader of the data base's licence texts whose category is (or is not) a free one."""

    def extract(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, lambda name: name.endswith(".LICENSE")):
            text = decode(data)
            front = FRONT.match(text)
            category = re.search(r"^category: (.*)$", front[1], re.M) if front else None
            if (category is not None and category[1].strip() in FREE) == free:
                yield name, FRONT.sub("", text)

    return extract


def uncommented(text: str) -> str:
    """Text without the comment marks of a program that most of its lines begin with."""
    lines = text.split("\n")
    full = [line for line in lines if line.strip()]
    for mark in (r"\s*/?\*+/?", r"\s*//+", r"\s*#+", r"\s*;+", r"\s*%+", r"\s*--+", r"\s*dnl\b", r"\s*>"):
        marked = sum(bool(re.match(mark, line)) for line in full)
        if marked >= 0.6 * max(len(full), 1):
            lines = [re.sub(rf"^{mark} ?", "", line) for line in lines]
            return "\n".join(lines).replace("*/", "")
    return text


def rules(path: Path) -> Iterator[tuple[str, str]]:
    """The data base's longer detection rules: notices and licence texts as found in the wild."""
    for name, data in members(path, lambda name: name.endswith(".RULE")):
        text = FRONT.sub("", decode(data)).replace("{{", "").replace("}}", "")
        text = uncommented(text)
        if len(text) >= SHORTEST_RULE:
            yield name, text


def spdx(path: Path) -> Iterator[tuple[str, str]]:
    """The texts of the SPDX licence list."""
    for _name, data in members(path, lambda name: name == "package/spdx-full.json"):
        for key, entry in sorted(json.loads(data).items()):
            yield key, entry["licenseText"]


LICENSEDCODE = Package("pip", "licensedcode-data")
SOURCES = [
    Source("spdx-licences", "law", Package("npm", "spdx-license-list"), "CC0-1.0", "package/license", True, spdx),
    Source("licensedcode-free", "law", LICENSEDCODE, "CC-BY-4.0", "cc-by-4.0.LICENSE", True, licences(True)),
    Source("licensedcode-other", "law", LICENSEDCODE, "CC-BY-4.0", "cc-by-4.0.LICENSE", False, licences(False)),
    Source("licensedcode-rules", "law", LICENSEDCODE, "CC-BY-4.0", "cc-by-4.0.LICENSE", False, rules),
]  # fmt: skip
