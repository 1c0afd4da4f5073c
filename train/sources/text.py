"""Readers that turn HTML, DocBook, roff, Markdown and R data into plain text."""

from __future__ import annotations

import gzip
import hashlib
import html
import re
import struct
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser

PARAGRAPHS = frozenset(
    ["p", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "ul", "ol", "dl", "table", "blockquote", "div", "section"]
)
LINES = frozenset(
    ["address", "article", "br", "center", "dd", "dt", "figure", "footer", "header", "hr", "li", "main"]
    + ["tbody", "td", "th", "tr"]
)
BLOCKS = PARAGRAPHS | LINES
SKIPPED = frozenset(["script", "style", "head", "nav", "footer", "svg", "form", "button", "select"])
VOID = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"]
)
SKIPPED_CLASS = re.compile(
    r"\b(sphinxsidebar|related|headerlink|footer|navheader|navfooter|toc|breadcrumbs|docnav)\b"
)


def stable_hash(text: str) -> int:
    """A 64-bit hash of text that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def maybe_gunzip(name: str, data: bytes) -> bytes:
    return gzip.decompress(data) if name.endswith((".gz", ".dz")) else data


def decode(data: bytes) -> str:
    """UTF-8, else Latin-1 (old texts)."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


class _TextOfHtml(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.stack: list[tuple[str, bool]] = []
        self.skipping = 0
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in PARAGRAPHS else "\n")
        if tag in VOID:
            return
        skip = tag in SKIPPED or bool(SKIPPED_CLASS.search(dict(attrs).get("class") or ""))
        self.stack.append((tag, skip))
        self.skipping += skip
        self.verbatim += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if not any(open_tag == tag for open_tag, _ in self.stack):
            return
        while self.stack:
            open_tag, skip = self.stack.pop()
            self.skipping -= skip
            self.verbatim -= open_tag == "pre"
            if open_tag == tag:
                break
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in PARAGRAPHS else "\n")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def text_of_html(page: str) -> str:
    """The visible text of a page: no markup, navigation, scripts; blocks end lines, preformatted text keeps its."""
    body = re.search(r"<(?:main|body)\b.*", page, re.S | re.I)
    parser = _TextOfHtml()
    parser.feed(body[0] if body else page)
    parser.close()
    lines = [line.rstrip() for line in "".join(parser.parts).replace("\xa0", " ").split("\n")]
    lines = [line[1:] if re.match(r" \S", line) else line for line in lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def text_of_docbook(page: str, entities: dict[str, str] | None = None) -> str:
    """The text of a DocBook file: paragraphs, titles and terms on lines of their own, other markup dropped."""
    page = re.sub(r"<!--.*?-->|<\?.*?\?>|<!DOCTYPE.*?(\[.*?\]\s*)?>", " ", page, flags=re.S)
    page = re.sub(r"<(screenshot|mediaobject|indexterm)\b.*?</\1>", " ", page, flags=re.S)
    page = re.sub(r"&([A-Za-z][\w.-]*);", lambda m: (entities or {}).get(m[1], m[0]), page)
    # Source line breaks inside a paragraph are layout; only the elements make lines.
    page = re.sub(r"\s+", " ", page)
    page = re.sub(r"</?(para|title|term|programlisting|screen|entry|member|simpara|subtitle)\b[^>]*>", "\n\n", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", page))
    page = re.sub(r"&[A-Za-z][\w.-]*;", "", page)
    lines = [line.strip() for line in page.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


ROFF_TEXT = re.compile(
    r"^[.']\s*(SH|SS|B|I|BR|IR|RB|RI|BI|IB|SB|SM|TP|IP|HP|Sh|Ss|Nm|Fl|Ar|Pa|Xr|Nd|It|Op|Cm|Dq|Em|Li)\b ?(.*)"
)
ROFF_PARAGRAPH = re.compile(r"^[.']\s*(PP|P|LP|Pp|TP|IP|HP|SH|SS|Sh|Ss)\b")


def text_of_roff(page: str) -> str:
    """The words of a manual page: requests and escapes dropped, headings and paragraphs kept apart by blank lines."""
    out: list[str] = []
    in_macro = False
    for line in page.split("\n"):
        if in_macro:
            in_macro = not line.startswith("..")
            continue
        if re.match(r"^[.']\s*(de|ig)\b", line):
            in_macro = True
            continue
        if re.match(r"^[.'](\\\"|\s*$)|^\\\"|^'''", line):
            continue
        if line.startswith((".", "'")):
            if ROFF_PARAGRAPH.match(line):
                out.append("")
            match = ROFF_TEXT.match(line)
            if not match or not match[2].strip():
                continue
            line = match[2].replace('"', "")
            if match[1] == "IP":
                line = re.sub(r"\s+\d+$", "", line)
            out.append(line)
            if match[1].upper() in ("SH", "SS"):
                out.append("")
            continue
        out.append(line)
    text = "\n".join(out)
    text = re.sub(r'\\".*', "", text)
    text = re.sub(r"\\f(\(..|\[[^\]]*\]|.)|\\s[-+]?\d+|\\[&|^/,%:c]|\\[vh]'[^']*'", "", text)
    text = re.sub(r"\\\*?\(lq|\\\(rq|\\\*\(rq|\\\((dq|oq|cq|aq)", '"', text)
    text = (
        text.replace("\\-", "-")
        .replace("\\e", "\\")
        .replace("\\ ", " ")
        .replace("\\(bu", "·")
        .replace("\\(co", "(c)")
    )
    text = re.sub(r"\\\(..|\\\[[^\]]*\]|\\\*\(..|\\\*\[[^\]]*\]|\\[nz]\S|\\(?=[.'])", "", text)
    text = "\n".join(line.strip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def text_of_markdown(page: str) -> str:
    """Markdown with links reduced to their words, heading marks and emphasis dropped, wrapped lines joined."""
    page = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", page)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"^#+\s*|\s*\{#[^}]*\}$|^[>*]\s+", "", page, flags=re.M)
    page = re.sub(r"(\*\*|__|(?<!\w)[_*]|[_*](?!\w)|\\(?=\W))", "", page)
    paragraphs = [re.sub(r"\s*\n\s*", " ", paragraph).strip() for paragraph in re.split(r"\n\s*\n", page)]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def r_objects(data: bytes) -> Iterator[bytes]:
    """The serialized objects of an R lazy-load data base (.rdb): length, perhaps a type letter, zlib stream."""
    at = 0
    while at + 4 < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        for skip in (4, 5):
            inflate = zlib.decompressobj()
            try:
                value = inflate.decompress(data[at + skip :])
            except zlib.error:
                continue
            if len(value) == size:
                yield value
                at = len(data) - len(inflate.unused_data)
                break
        else:
            raise ValueError(f"not an R data base: no object of {size} bytes at offset {at}")


def r_strings(value: bytes) -> list[list[str]]:
    """Every character vector (of 2 strings or more) in a serialized R object, in the order they lie there."""
    found: list[list[str]] = []
    at = value.find(b"\x00\x00\x00\x10")
    while at >= 0:
        (count,) = struct.unpack_from(">i", value, at + 4) if at + 8 <= len(value) else (0,)
        strings, end = _character_vector(value, at + 8, count)
        if strings is not None and count > 1:
            found.append(strings)
        at = value.find(b"\x00\x00\x00\x10", end if strings is not None else at + 1)
    return found


def _character_vector(value: bytes, at: int, count: int) -> tuple[list[str] | None, int]:
    strings: list[str] = []
    for _ in range(max(count, 0)):
        if at + 8 > len(value):
            return None, at
        flags, size = struct.unpack_from(">ii", value, at)
        at += 8
        if flags & 0xFF != 9 or size < -1 or at + size > len(value):
            return None, at
        strings.append(value[at : at + max(size, 0)].decode("utf-8", "replace"))
        at += max(size, 0)
    return strings, at


def pieces(text: str, size: int, joint: str = "\n\n") -> Iterator[str]:
    """Cut text at `joint` into pieces of about `size` characters (the last may be shorter)."""
    piece: list[str] = []
    length = 0
    for paragraph in text.split(joint):
        piece.append(paragraph)
        length += len(paragraph) + len(joint)
        if length >= size:
            yield joint.join(piece)
            piece, length = [], 0
    if piece:
        yield joint.join(piece)


def batches(entries: list[str], size: int, joint: str) -> Iterator[tuple[str, str]]:
    """Documents of `size` short entries each, in the order of the entries' hashes: (key, text)."""
    entries = sorted(dict.fromkeys(entries), key=lambda entry: (stable_hash(entry), entry))
    for at in range(0, len(entries), size):
        yield f"{at:07d}", joint.join(entries[at : at + size])
