"""Corrections: what was asked, what was answered, and what should have been, a JSONL row each.

    {"messages": [...], "given": "It is 3 pm.", "wanted": "It is 4 pm."}
    {"messages": [...], "given": "It is 3 pm.", "edit": {"replace": "3", "with": "4"}}
    {"request_id": "chatcmpl-...", "edit": {"replace": "3", "with": "4"}}

`replace` stands in the given answer exactly once, or `occurrence` (from 1) says which one is meant. With a log and
the request's id, messages, answer and how the prompt was made are the log's; what the row says of them must agree.
Otherwise `thinking` and `effort` say it, as in a request, and of a request that thinks `reasoning` is the text
before the answer. A row that cannot be used is a `Problem` with its line; a file in another encoding is refused
whole.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.checkpoint.files import require_regular
from ds4.errors import FileFormatError
from ds4.posttrain.log import Logged, Problem, parse_row, read_log
from ds4.posttrain.quotes import strings_of

KEYS = ("messages", "tools", "given", "wanted", "edit", "request_id", "thinking", "effort", "reasoning", "note")
# UTF-32's mark begins with UTF-16's
_FOREIGN = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip


@dataclass(frozen=True)
class Correction:
    """A row that can be used.

    Attributes:
        messages, thinking, effort: what the prompt is made of (ds4.model.chat.render).
        given, wanted: the answer without its reasoning.
        reasoning: the text before it; None: not known, or there is none.
        tools: that the request declared.
        drawn: the tokens that the answer was made of, the one that ended it too, where the log knows.
        cut: the answer ended at its token limit.
    """

    line: int
    messages: Sequence[Mapping[str, Any]]
    given: str
    wanted: str
    thinking: bool = False
    effort: int | str | None = None
    reasoning: str | None = None
    request_id: str | None = None
    drawn: tuple[int, ...] | None = None
    cut: bool = False
    tools: Sequence[Any] = ()


@dataclass(frozen=True)
class Corrections:
    """A file of them; `sha256` of its bytes, `problems` the lines that are none."""

    rows: tuple[Correction, ...]
    problems: tuple[Problem, ...]
    sha256: str


def read_corrections(path: str | Path, log: Path | None = None) -> Corrections:
    """The corrections of a file; empty lines count for nothing.

    Args:
        log: the folder of the log that has the requests which they name.

    Raises:
        FileFormatError: it cannot be read, is in another encoding, or has no row at all.
    """
    path = Path(path)
    require_regular(path)
    try:
        data = path.read_bytes()
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
    for mark, name in _FOREIGN:
        if data.startswith(mark):
            raise FileFormatError(f"{path}: is {name}; corrections are JSON lines in UTF-8, convert it")
    if data.startswith(codecs.BOM_UTF8):
        raise FileFormatError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
    if b"\0" in data[:1024]:
        raise FileFormatError(
            f"{path}: has zero bytes, as UTF-16 has; corrections are JSON lines in UTF-8, convert it"
        )
    parsed: list[tuple[int, dict[str, Any]]] = []
    problems: list[Problem] = []
    for n, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                parsed.append((n, parse_row(line)))
            except ValueError as e:
                problems.append(Problem(n, str(e)))
    if not parsed and not problems:
        raise FileFormatError(f"{path}: has no corrections; it needs a JSON object a line")
    named = {row["request_id"] for _, row in parsed if isinstance(row.get("request_id"), str)}
    known = None if log is None else read_log(log, named)
    rows: list[Correction] = []
    for n, row in parsed:
        try:
            rows.append(_correction(n, row, known))
        except ValueError as e:
            problems.append(Problem(n, str(e)))
        except RecursionError:  # not deep enough for the JSON reader, too deep for us
            problems.append(Problem(n, "is nested too deep"))
    problems.sort(key=lambda p: p.line)
    return Corrections(tuple(rows), tuple(problems), hashlib.sha256(data).hexdigest())


def _correction(line: int, row: Mapping[str, Any], log: Mapping[str, Logged] | None) -> Correction:
    """A row as a correction.

    Raises:
        ValueError: why it is none.
    """
    for key in row:
        if key not in KEYS:
            raise ValueError(f"has {key!r:.40}; a correction has {', '.join(KEYS)}")
    half = next((s for s in strings_of(row) if not _whole(s)), None)
    if half is not None:
        raise ValueError(f"has half a character, a lone surrogate, in {half!r:.60}")
    request_id = _typed(row, "request_id", str)
    known = log.get(request_id) if log is not None and request_id is not None else None
    said = dict(row) if known is None else _with_log(row, known)
    messages, given = _typed(said, "messages", list), _typed(said, "given", str)
    for name, value in (("messages", messages), ("given", given)):
        if value is None:
            raise ValueError(
                f"has no {name!r}"
                if request_id is None
                else f"has no {name!r}, and request {request_id} is not in the log"
                if log is not None
                else f"has no {name!r}; name the log that request {request_id} is in"
            )
    wanted = _wanted(said, given)
    if wanted == given:
        raise ValueError("wants what was given: nothing is to be decided")
    effort = said.get("effort")
    if effort is not None and (isinstance(effort, bool) or not isinstance(effort, (int, str))):
        raise ValueError(f"has an effort that is {effort!r:.40}; it is a name, or a number from 1 to 100")
    return Correction(
        line, messages, given, wanted, bool(_typed(said, "thinking", bool)), effort, _typed(said, "reasoning", str),
        request_id, said.get("drawn"), bool(said.get("cut")), _typed(said, "tools", list) or (),
    )  # fmt: skip


def _wanted(row: Mapping[str, Any], given: str) -> str:
    """The answer that was wanted: whole, or the given one edited."""
    wanted, edit = _typed(row, "wanted", str), _typed(row, "edit", dict)
    if (wanted is None) == (edit is None):
        raise ValueError('needs what was wanted: either "wanted", the whole answer, or "edit"')
    if edit is None:
        return str(wanted)
    for key in edit:
        if key not in ("replace", "with", "occurrence"):
            raise ValueError(f'has an edit with {key!r:.40}; it has "replace", "with" and at most "occurrence"')
    old, new, which = _typed(edit, "replace", str), _typed(edit, "with", str), _typed(edit, "occurrence", int)
    if not old or new is None:
        raise ValueError('has an edit without "replace" or "with"; both are texts, the first is not empty')
    places = [i for i in range(len(given) - len(old) + 1) if given.startswith(old, i)]
    if not places:
        raise ValueError(f"has an edit of {old!r:.60}, which is not in the given answer")
    if which is None and len(places) > 1:
        raise ValueError(
            f"has an edit of {old!r:.60}, which is in the given answer {len(places)} times; give more of the text, "
            'or "occurrence"'
        )
    if which is not None and not 1 <= which <= len(places):
        raise ValueError(f"has an edit of occurrence {which}; {old!r:.60} is in the given answer {len(places)} times")
    at = places[(which or 1) - 1]
    return f"{given[:at]}{new}{given[at + len(old) :]}"


def _with_log(row: Mapping[str, Any], known: Logged) -> dict[str, Any]:
    """The row, with what the log says of its request."""
    where = f"line {known.line} of {known.path.name}"
    logged, answer = known.row, known.row.get("answer")
    if "messages" not in logged:
        raise ValueError(f"is of a completion ({where}); corrections are of chats")
    try:
        if not isinstance(answer, Mapping):
            raise ValueError("no answer")
        has: dict[str, Any] = {
            "messages": _typed(logged, "messages", list), "tools": _typed(logged, "tools", list),
            "given": _typed(answer, "content", str),
            "thinking": bool(_typed(logged, "thinking", bool)), "effort": logged.get("effort"),
            "reasoning": _typed(answer, "reasoning", str),
        }  # fmt: skip
        drawn = _typed(logged, "answer_ids", list)
        if drawn is not None and not all(type(i) is int for i in drawn):
            raise ValueError("answer_ids that are no ids")
    except ValueError as e:
        raise ValueError(f"is of {where}, which is damaged: {e}") from None
    for name, value in has.items():
        if row.get(name) is not None and row[name] != value:
            raise ValueError(f"has other {name} than its request has in the log ({where})")
    more = {"drawn": None if drawn is None else tuple(drawn), "cut": logged.get("finish_reason") == "length"}
    return {**row, **has, **more}


def _typed(row: Mapping[str, Any], name: str, kind: type) -> Any:
    value = row.get(name)
    if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        names = {str: "a text", list: "a list", dict: "an object", bool: "true or false", int: "a whole number"}
        raise ValueError(f"has {name!r} that is not {names[kind]}")
    return value


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
