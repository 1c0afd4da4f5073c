"""What the dialogues talk about, found in the corpora: words, terms, codes, elements, functions, clauses, passages.

Everything is read from one split, so that a judge dialogue asks about judge text. Nothing here is random.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ds4.errors import FileFormatError
from train.config import corpus_path, read_rows

_WORD = re.compile(r"([A-Za-z][A-Za-z' -]{1,40})(?:, [^,:()]{1,40})*(?: \((noun|verb|adjective|adverb)\))?: (.+)")
_TERM = re.compile(r"([A-Z0-9a-z][^:.;]{3,70}): ([A-Z].{20,420})")
_ICD = re.compile(r"([A-TV-Z][0-9][0-9A-Z](?:\.[0-9A-Z]{1,4})?) (.{6,120})")
_ELEMENT = re.compile(r"([A-Z][a-z]+) \(([A-Z][a-z]?)\), element (\d+)")
_MAN = re.compile(r"([a-z][a-z0-9_.+-]{1,15}) (?:-{1,2}|\\-|—|–) ([^\n]{4,60})")
# Old speeches speak of people in ways that no answer should.
_DATED = re.compile(
    r"\b(Indians?|savages?|negro(es)?|slave(s|ry)?|tribes?|races?|colored|heathens?|barbar\w*|inferior|Chinamen|retard\w*)\b",
    re.IGNORECASE,
)
MAX_LINES, MAX_CHARS = 14, 520  # of a function that fits a short answer
FUNCTION_FILES = 2500  # source files looked through


@dataclass(frozen=True)
class Word:
    word: str
    pos: str  # "noun", "verb", "adjective", "adverb", or "word" where the text does not say
    gloss: str
    example: str


@dataclass(frozen=True)
class Term:
    kind: str  # "GO term" or "HPO term"
    name: str
    definition: str


@dataclass(frozen=True)
class Element:
    name: str
    symbol: str
    number: int
    fact: str


@dataclass(frozen=True)
class Function:
    name: str
    signature: str
    summary: str  # one sentence, without its full stop
    source: str  # without the docstring


@dataclass(frozen=True)
class Passage:
    given: str
    rest: str
    source: str  # "sotu" or "austen"


@dataclass
class Material:
    """All of one split, each list in the order of the corpora."""

    words: list[Word] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    codes: list[tuple[str, str]] = field(default_factory=list)
    elements: list[Element] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    clauses: list[str] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    commands: list[tuple[str, str]] = field(default_factory=list)  # Chinese manual pages: name, what it does
    chinese: list[str] = field(default_factory=list)  # short Chinese sentences


def gather(work: Path, split: str) -> Material:
    """Read a split.

    Raises:
        FileFormatError: a corpus is missing, or nothing in it looks like what a kind of dialogue needs.
    """
    out = Material()
    for source, text in _rows(work, "general", split):
        if source == "wordnet":
            out.words += words(text)
        elif source in ("sotu", "austen"):
            out.passages += passages(source, text)
    for source, text in _rows(work, "science", split):
        if source == "gene-ontology":
            out.terms += terms("GO term", text)
        elif source == "mendeleev":
            out.elements += elements(text)
    for source, text in _rows(work, "medicine", split):
        if source == "icd-10-cm":
            out.codes += [(m[1], m[2].strip()) for m in map(_ICD.fullmatch, text.splitlines()) if m]
        elif source == "hpo":
            out.terms += terms("HPO term", text)
    files = 0
    for _, text in _rows(work, "code", split):
        if "def " in text and files < FUNCTION_FILES:
            files += 1
            out.functions += functions(text)
    for _, text in _rows(work, "law", split):
        out.clauses += clauses(text)
    for source, text in _rows(work, "chinese", split):
        if source == "manpages-zh":
            out.commands += commands(text)
        out.chinese += re.findall(r"[\u4e00-\u9fa5，、]{8,40}。", text)[:6]
    for name, value in vars(out).items():
        if not value and split == "train":
            raise FileFormatError(
                f"{work / 'corpora'}: the train text has no {name} to make dialogues of; "
                "is a package missing from `python -m train.corpora`?"
            )
        setattr(out, name, list(dict.fromkeys(value)))
    return out


def _rows(work: Path, domain: str, split: str) -> Iterable[tuple[str, str]]:
    return ((str(row.get("source", "")), row["text"]) for row in read_rows(corpus_path(work, domain, split)))


def words(text: str) -> list[Word]:
    """`word, word (noun): gloss; "example"`, one a line; the part of speech may be missing."""
    out = []
    for m in filter(None, map(_WORD.fullmatch, text.splitlines())):
        gloss, _, examples = m[3].partition('; "')
        example = examples.partition('"')[0].strip()
        if 8 <= len(gloss) <= 200 and not _DATED.search(m[0]):
            out.append(Word(m[1], m[2] or "word", gloss.rstrip(" ."), example if len(example) <= 120 else ""))
    return out


def terms(kind: str, text: str) -> list[Term]:
    """`name: definition`, one a line; the definition's first two sentences."""
    found = filter(None, map(_TERM.fullmatch, text.splitlines()))
    return [Term(kind, m[1].strip(), first_sentences(m[2], 2)) for m in found if not _DATED.search(m[0])]


def elements(text: str) -> list[Element]:
    """A document `Name (Sy), element 26`, then sentences; the first one or two are the fact."""
    m = _ELEMENT.match(text)
    body = text[m.end() :].strip().split("\n")[0] if m else ""
    return [Element(m[1], m[2], int(m[3]), first_sentences(body, 2))] if m and 25 <= len(body) <= 900 else []


def functions(text: str) -> list[Function]:
    """Short documented functions of a Python source; none if it does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.splitlines()
    out = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 2:
            continue
        doc = ast.get_docstring(node)
        first = node.body[1]
        method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        if not doc or method or node.name.startswith(("_", "test")) or node.end_lineno is None:
            continue
        summary = re.split(r"\n\s*\n|(?<=[a-z)])\.\s", doc, maxsplit=1)[0]
        summary = " ".join(summary.split()).rstrip(".")
        head = lines[node.lineno - 1 : node.body[0].lineno - 1]
        body = lines[first.lineno - 1 : node.end_lineno]
        source = textwrap.dedent("\n".join(head + body))
        if not re.fullmatch(r"[A-Z][^:>`*\\]{15,110}", summary) or summary.endswith(("i.e", "e.g", " etc")):
            continue
        fits = len(head) + len(body) <= MAX_LINES and len(source) <= MAX_CHARS
        if fits and source.startswith(f"def {node.name}") and len(head) <= 3:
            signature = " ".join(" ".join(head).split()).removeprefix("def ").rstrip(":")
            out.append(Function(node.name, signature, summary, source))
    return out


def clauses(text: str) -> list[str]:
    """English paragraphs of a licence that are whole sentences and short enough to quote."""
    paragraphs = (" ".join(p.split()) for p in text.split("\n\n"))
    whole = [p for p in paragraphs if 90 <= len(p) <= 480 and p[0].isalnum() and p.endswith(".")]
    return [p for p in whole if re.search(r"\b(the|The|this|This|any)\b", p) and " ." not in p]


def passages(source: str, text: str) -> list[Passage]:
    """Pairs of neighbouring pieces of prose: what is given, and how it goes on."""
    out = []
    for paragraph in text.split("\n\n"):
        sentences = split_sentences(" ".join(paragraph.split()))
        for at in range(0, len(sentences) - 3, 8):
            given, rest = " ".join(sentences[at : at + 2]), " ".join(sentences[at + 2 : at + 4])
            fits = 60 <= len(given) <= 360 and 30 <= len(rest) <= 360 and given[0].isupper()
            if fits and not _DATED.search(given + rest):
                out.append(Passage(given, rest, source))
    return out


def commands(text: str) -> list[tuple[str, str]]:
    """`name - what it does` in Chinese, near the top of a manual page."""
    m = _MAN.search(text[:600])
    return [(m[1], m[2].strip().rstrip("。."))] if m and re.search("[\u4e00-\u9fa5]", m[2]) else []


def split_sentences(text: str) -> list[str]:
    return re.findall(r"\S.*?(?<!Mr)(?<!Mrs)(?<!Dr)(?<!\b[A-Z])[.!?](?=\s+[A-Z\"“]|$)", text)


def first_sentences(text: str, count: int) -> str:
    found = split_sentences(text)
    return " ".join(found[:count]) if found else text
