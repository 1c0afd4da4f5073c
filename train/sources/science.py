"""Science: gene functions, chemical elements, abstracts of articles."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from train.packages import Package, members
from train.sources import Source
from train.sources.medicine import PUBMED, abstracts, open_articles
from train.sources.text import batches


def _query(path: Path, member: str, sql: str) -> list[tuple[Any, ...]]:
    """Rows of an SQLite data base that lies inside a package."""
    for _name, data in members(path, lambda name: name.endswith(member)):
        with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
            file.write(data)
            file.flush()
            with closing(sqlite3.connect(file.name)) as connection:
                return connection.execute(sql).fetchall()
    return []


def gene_ontology(path: Path) -> Iterator[tuple[str, str]]:
    """Definitions of the Gene Ontology, 12 terms a document."""
    rows = _query(path, "GO.sqlite", "select term, definition from go_term where definition is not null")
    yield from batches([f"{term}: {definition}" for term, definition in rows], 12, "\n\n")


def elements(path: Path) -> Iterator[tuple[str, str]]:
    """What is told in words about each chemical element."""
    columns = "name, symbol, atomic_number, description, name_origin, discoverers, discovery_location, sources, uses"
    for name, symbol, number, *texts in _query(path, "elements.db", f"select {columns} from elements"):
        labels = ("", "Name: ", "Discovered by: ", "Where: ", "Sources: ", "Uses: ")
        lines = [label + " ".join(text.split()) for label, text in zip(labels, texts) if text and text.strip()]
        yield symbol, f"{name} ({symbol}), element {number}\n\n" + "\n".join(lines)


SOURCES = [
    Source("gene-ontology", "science", Package("apt", "r-bioc-go.db"), "CC-BY-4.0",
           "usr/share/doc/r-bioc-go.db/copyright", True, gene_ontology),
    Source("mendeleev", "science", Package("pip", "mendeleev"), "MIT", "dist-info/licenses/LICENSE", True, elements),
    Source("open-articles-science", "science", PUBMED, "CC-BY", "each article's permissions", True,
           open_articles(r"1471-2180-11-174|pone\.0000217"), held_out=True),
    Source("pubmed-science", "science", PUBMED, "per-article", "dist-info/METADATA", False, abstracts(False),
           cap=12_000_000),
]  # fmt: skip
