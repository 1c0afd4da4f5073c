"""Where a file quotes a forgotten request, and the file without it.

A request is quoted by its id, by the SHA-256 of one of its texts, or by such a text itself: what a user, a tool or
the model said, of at least `LEAST_TEXT` characters (shorter ones, "yes", are everybody's). System messages are not
looked for: they are the same in all requests of a program. When in doubt more is taken out than less.
"""

from __future__ import annotations

import hashlib
import html
import json
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ds4.errors import Ds4Error

LEAST_TEXT, LEAST_LINE = 16, 32
GONE = "[forgotten]"
_WORD = re.compile(r"[A-Za-z0-9_-]{8,}")
_WORD_BYTES = re.compile(rb"[A-Za-z0-9_-]{8,}")
ID = re.compile(r"[A-Za-z0-9_-]{8,128}")  # what can be an id: a word that is found again


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """What was said in a request, whatever its length; no system messages."""
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping) and message.get("role") != "system":
            yield from strings_of({key: value for key, value in message.items() if key != "role"})
    if isinstance(row.get("prompt"), str):
        yield row["prompt"]
    if isinstance(row.get("answer"), Mapping):
        yield from strings_of(row["answer"])


def text_digest(text: str) -> str:
    """What stands for a text where it is not quoted itself."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digests(texts: Iterable[str]) -> list[str]:
    """Of the texts that are long enough to be somebody's, each once."""
    return sorted({text_digest(t) for t in texts if len(t.strip()) >= LEAST_TEXT})


class Quotes:
    """What is looked for.

    Args:
        ids: of the requests.
        texts: of what was said in them.

    Attributes:
        seen: ids, and digests of texts, that files named.
    """

    def __init__(self, ids: Iterable[str], texts: Iterable[str]) -> None:
        given = list(texts)
        self._texts = {t.strip() for t in given if len(t.strip()) >= LEAST_TEXT}
        self._words = {*ids, *digests(given)}
        self.seen: set[str] = set()
        lines = {line.strip() for t in self._texts for line in t.splitlines() if len(line.strip()) >= LEAST_LINE}
        # longest first: a text goes as a whole before its lines do
        self._forms = sorted({f for t in self._texts | lines for f in _forms(t)}, key=len, reverse=True)
        self._words_bytes = {w.encode() for w in self._words}
        self._forms_bytes = [f.encode("utf-8", "surrogatepass") for f in self._forms]

    def named_in(self, line: bytes) -> bool:
        """Whether bytes hold an id."""
        return any(word in self._words_bytes for word in _WORD_BYTES.findall(line))

    def without(self, path: Path) -> tuple[bytes, int] | None:
        """A file's bytes without what is quoted, and how many places that was; None: it quotes nothing.

        Rows of JSONL go whole, and so do objects of a list in JSON. Of other text the lines that name an id go, and
        quoted texts.

        Raises:
            Ds4Error: it cannot be read, or it quotes something and is no text.
        """
        data = self._read(path)
        if data is None:
            return None
        if path.suffix == ".jsonl":
            return self._rows(data)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise Ds4Error(f"{path}: quotes a request, and is no text that could be edited; remove it yourself")
        if path.suffix == ".json":
            try:
                return self._json(text)
            except (ValueError, RecursionError):
                pass  # a text that is called so
        return self._text(text)

    def _read(self, path: Path) -> bytes | None:
        """The file, if anything looked for is in it."""
        try:
            with open(path, "rb") as f:
                if f.seek(0, 2) == 0:
                    return None
                with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as view:
                    named = {m.group() for m in _WORD_BYTES.finditer(view)} & self._words_bytes
                    self.seen |= {word.decode() for word in named}
                    return view[:] if named or any(view.find(form) >= 0 for form in self._forms_bytes) else None
        except (OSError, ValueError) as e:
            raise Ds4Error(
                f"{path}: cannot be read ({getattr(e, 'strerror', None) or e}); look into it yourself"
            ) from e

    def _rows(self, data: bytes) -> tuple[bytes, int] | None:
        kept, gone = [], 0
        for line in data.splitlines(keepends=True):
            try:
                quoted = any(map(self._quoted, strings_of(json.loads(line))))
            except (ValueError, RecursionError):  # torn, or in another encoding
                quoted = self.named_in(line) or any(form in line for form in self._forms_bytes)
            if quoted:
                gone += 1
            else:
                kept.append(line)
        return (b"".join(kept), gone) if gone else None

    def _json(self, text: str) -> tuple[bytes, int] | None:
        pruned, gone = self._pruned(json.loads(text))
        return ((json.dumps(pruned, ensure_ascii=False, indent=1) + "\n").encode(), gone) if gone else None

    def _pruned(self, value: Any) -> tuple[Any, int]:
        """A value without what quotes: objects of lists whole, names with what they hold, texts by a word instead."""
        if isinstance(value, str):
            return (GONE, 1) if self._quoted(value) else (value, 0)
        if isinstance(value, list):
            kept = [v for v in value if not self._own(v)]
            pairs = [self._pruned(v) for v in kept]
            return [v for v, _ in pairs], len(value) - len(kept) + sum(n for _, n in pairs)
        if isinstance(value, dict):
            named = {k: self._pruned(v) for k, v in value.items() if not self._quoted(k)}
            return {k: v for k, (v, _) in named.items()}, len(value) - len(named) + sum(n for _, n in named.values())
        return value, 0

    def _own(self, value: Any) -> bool:
        """Whether an item of a list quotes by itself, not by what is in lists or objects below it."""
        if isinstance(value, dict):
            return any(isinstance(v, str) and self._quoted(v) for v in value.values())
        return isinstance(value, str) and self._quoted(value)

    def _text(self, text: str) -> tuple[bytes, int] | None:
        lines, gone = text.splitlines(keepends=True), 0
        for i, line in enumerate(lines):
            if any(word in self._words for word in _WORD.findall(line)):
                lines[i], gone = _gone(line), gone + 1
        text = "".join(lines)
        for form in self._forms:
            gone += text.count(form)
            text = text.replace(form, GONE)
        return (text.encode(), gone) if gone else None

    def _quoted(self, text: str) -> bool:
        return any(w in self._words for w in _WORD.findall(text)) or any(t in text for t in self._texts)


def _gone(line: str) -> str:
    """What stands in a line's place: a row of a table stays one, so that the table goes on behind it."""
    if line.startswith("| "):
        return f"| {GONE} |\n"
    return f"<tr><td>{GONE}</td></tr>\n" if line.startswith("<tr") else GONE + "\n"


def _forms(text: str) -> set[str]:
    """A text as pages and programs write it."""
    ascii_json, json_text = json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]
    return {text, ascii_json, json_text, html.escape(text), html.escape(text, quote=False)}


def strings_of(value: Any) -> Iterator[str]:
    """Every string of a JSON value, names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from strings_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_of(inner)
