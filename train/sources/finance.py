"""Finance: a bookkeeping manual and the definitions of a derivatives data model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from train.packages import Package, members
from train.sources import Source
from train.sources.text import batches, decode, text_of_docbook

ENTITIES = {"app": "GnuCash", "appname": "GnuCash", "vers-stable": "4.13", "version": "4.13"}


def bookkeeping(path: Path) -> Iterator[tuple[str, str]]:
    """The chapters of the English guide and help of GnuCash, cut at their sections."""

    def want(name: str) -> bool:
        return bool(re.search(r"usr/share/help/C/.*\.(docbook|xml)$", name)) and "fdl" not in name

    for name, data in members(path, want):
        for number, section in enumerate(re.split(r"(?=<sect1\b)", decode(data))):
            yield f"{name}#{number}", text_of_docbook(section, ENTITIES)


def definitions(path: Path) -> Iterator[tuple[str, str]]:
    """The docstrings of the FINOS Common Domain Model's Python package, 8 a document."""
    entries = []
    for _name, data in members(path, lambda name: name.endswith(".py")):
        text = decode(data)
        found = re.findall(r'"""(.*?)"""', text, re.S)
        found += re.findall(r"description=['\"](.*?)['\"]\s*[,)]", text, re.S)
        for entry in found:
            entry = re.sub(r"\s+", " ", entry.split("Parameters\n")[0].split("----")[0]).strip()
            if len(entry) >= 100 and " " in entry:
                entries.append(entry)
    yield from batches(entries, 8, "\n\n")


SOURCES = [
    Source("gnucash-docs", "finance", Package("apt", "gnucash-docs"), "GFDL-1.1-or-later",
           "usr/share/doc/gnucash-docs/copyright", True, bookkeeping),
    Source("finos-cdm", "finance", Package("pip", "finos-cdm"), "Apache-2.0", "dist-info/licenses/LICENSE", True,
           definitions),
]  # fmt: skip
