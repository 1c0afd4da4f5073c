"""Tool calls out of an answer as it is drawn: the one reader of the CALLS grammar (encoding.md 6).

Only the marker token opens and closes anything: its spelling, in whatever tokens, is text. An answer goes in piece by
piece, with `MARK` where the marker was drawn; text, and calls with their arguments as they grow, come out. What is
sent stays true: a call begins when its name is complete, a value flows but for what may be the beginning of its
closing tag, and nothing that was sent of a call that breaks the grammar is JSON by itself.

    text\\n\\n<M calls>\\n
    <M invoke name="NAME">\\n  <M parameter name="KEY" string="true|false">VALUE</M parameter>\\n  </M invoke>\\n
    </M calls>

A call that was written to its `</M invoke>` stands, whatever comes after it: more text, another block, nothing. One
that was not is text, from the first character of its markup on, and ends its block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from ds4.model.tokenizer import DSML, StreamDecoder, Tokenizer
from ds4.model.tools import json_text, json_value

MARK = "\udc00"  # the marker token in a piece; no decoded text holds a surrogate
SPACE = " \t\n\r"  # JSON's
MOST_HEADER = 1024  # characters of a name or a key: more of them in one is no header

OPENING = f"<{MARK} calls"
INVOKE = f'<{MARK} invoke name="'
PARAMETER = f'<{MARK} parameter name="'
END_VALUE = f"</{MARK} parameter"
END_INVOKE = f"</{MARK} invoke>"
END_BLOCK = f"</{MARK} calls>"
_MAY_OPEN = re.compile(r"\n{0,2}<?\Z")


@dataclass(frozen=True)
class Said:
    """Text. `raw` has `MARK` for a marker; `at`: pieces' characters before it, those of calls too."""

    at: int
    raw: str

    @property
    def text(self) -> str:
        return spelled(self.raw)


@dataclass(frozen=True)
class Begun:
    """Call `index` of the answer begins; `name` as it was written, NAMESPACE::NAME if it has one."""

    index: int
    name: str


@dataclass(frozen=True)
class Grown:
    """More of the JSON text of call `index`'s arguments, an object."""

    index: int
    text: str


@dataclass(frozen=True)
class Ended:
    """Call `index` is complete."""

    index: int


@dataclass(frozen=True)
class Broken:
    """Call `index` is none: its markup follows as text."""

    index: int


Event = Said | Begun | Grown | Ended | Broken


def spelled(raw: str) -> str:
    """Markers as the name of their token."""
    return raw.replace(MARK, DSML)


def split_name(full: str) -> tuple[str | None, str] | None:
    """NAMESPACE::NAME or NAME as (namespace, name); None if it is neither."""
    head, sep, tail = full.partition("::")
    if not head or (sep and (not tail or "::" in tail)):
        return None
    return (head, tail) if sep else (None, head)


class CallParser:
    """Pieces of content in, events out. How the pieces are cut changes only how text and arguments are.

    Attributes:
        malformed: a block was begun that does not keep to the grammar.
        received: characters so far; a marker is one.
    """

    def __init__(self) -> None:
        self.malformed = False
        self.received = 0
        self._buffer = ""  # undecided, `_at` being its first character's place
        self._at = 0
        self._state: Callable[[], bool] = self._text
        self._events: list[Event] = []
        self._index = -1  # of the last call that began
        self._kept: list[str] = []  # raw text of the call under way, back to where its markup began
        self._kept_at = 0
        self._keys: set[str] = set()
        self._value: _Value = _TextValue()

    def push(self, piece: str) -> list[Event]:
        """What became certain with a piece of text, or with `MARK`."""
        self._buffer += piece
        self.received += len(piece)
        return self._run()

    def finish(self) -> list[Event]:
        """The answer ends here: what was held back is text, a call that is not complete too."""
        out = self._run()
        if self._in_call:
            self._break()
        elif self._state == self._next:
            self.malformed = True  # the block was not closed; a beginning of its end is no text
            if ("\n" + END_BLOCK).startswith(self._buffer):
                self._take(len(self._buffer))
        elif self._state == self._after:
            self._take(len(self._buffer))
        elif self._state == self._opening:
            self.malformed |= OPENING in self._buffer
        self._state = self._text
        self._say(len(self._buffer))
        return out + self._taken()

    def _run(self) -> list[Event]:
        while self._state():
            pass
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @property
    def _in_call(self) -> bool:
        return self._state in (self._inside, self._in_value, self._after_value)

    def _take(self, n: int) -> str:
        """The first `n` undecided characters, decided."""
        taken, self._buffer = self._buffer[:n], self._buffer[n:]
        self._at += n
        return taken

    def _say(self, n: int) -> None:
        at = self._at
        if raw := self._take(n):
            self._events.append(Said(at, raw))

    def _keep(self, n: int) -> str:
        """As `_take`, of a call: it is text again if the call breaks."""
        self._kept.append(self._take(n))
        return self._kept[-1]

    def _begins(self, literal: str) -> bool | None:
        """Whether the buffer begins with `literal`; None: it may still."""
        if self._buffer.startswith(literal):
            return True
        return None if literal.startswith(self._buffer) else False

    # Each state takes what it can decide and says whether to go on at once: False waits for more.

    def _text(self) -> bool:
        at = self._buffer.find(MARK)
        if at < 0:
            may_open = _MAY_OPEN.search(self._buffer)
            assert may_open is not None  # it matches nothing at the end of anything
            self._say(may_open.start())
            return False
        may_open = _MAY_OPEN.search(self._buffer[:at])
        assert may_open is not None
        if self._buffer[at - 1 : at] != "<":
            self._say(at + 1)
            return True
        self._say(may_open.start())
        self._state = self._opening
        return True

    def _no_block(self) -> bool:
        """What began like markup is text, to its first marker; another may begin right behind."""
        self._say(self._buffer.index(MARK) + 1)
        self._state = self._text
        return True

    def _opening(self) -> bool:
        """At up to two newlines, `<` and a marker; a block begins with the name of its first call."""
        newlines = self._buffer[: self._buffer.index("<")]
        return self._header(f"{newlines}{OPENING}>\n{INVOKE}", newlines + OPENING)

    def _header(self, literal: str, begun: str) -> bool:
        """`literal`, then a call's name. Anything else is text, and malformed if it begins with `begun`."""
        begins = self._begins(literal)
        name = _upto(self._buffer[len(literal) :], '">\n') if begins else ""
        if begins is None or name is None:
            return False
        if not begins or split_name(name) is None:
            self.malformed |= self._buffer.startswith(begun)
            return self._no_block()
        self._kept, self._kept_at, self._keys = [], self._at, set()
        self._keep(len(literal) + len(name) + 3)
        self._index += 1
        self._events.append(Begun(self._index, name))
        self._state = self._inside
        return True

    def _next(self) -> bool:
        """After a call: another, or the end of the block."""
        closing, more = self._begins("\n" + END_BLOCK), self._begins("\n" + INVOKE)
        if closing:
            self._take(1 + len(END_BLOCK))
            self._state = self._after
            return True
        if more:
            return self._header("\n" + INVOKE, "")
        if closing is None or more is None:
            return False
        self.malformed = True
        self._state = self._text
        return True

    def _after(self) -> bool:
        """After a block: white space, which is no text if nothing else comes."""
        if not self._buffer or self._buffer.isspace():
            return False
        self._state = self._text
        return True

    def _inside(self) -> bool:
        """In a call: a parameter, or the end of it. Our own rendering of one without parameters has an empty line."""
        parameter = self._begins(PARAMETER)
        ends = [END_INVOKE] if self._keys else [END_INVOKE, "\n" + END_INVOKE]
        closing = [self._begins(end) for end in ends]
        for end, found in zip(ends, closing):
            if found:
                self._take(len(end))
                self._events += [Grown(self._index, "}" if self._keys else "{}"), Ended(self._index)]
                self._kept = []
                self._state = self._next
                return True
        if parameter:
            return self._parameter()
        return self._break() if parameter is False and None not in closing else False

    def _parameter(self) -> bool:
        key = _upto(self._buffer[len(PARAMETER) :], '" string="')
        if key is None:
            return False
        head = PARAMETER + key + '" string="'
        flags = [self._begins(head + flag) for flag in ('true">', 'false">')]
        if not any(flags):
            return False if None in flags else self._break()
        if key in self._keys:
            return self._break()
        is_text = bool(flags[0])
        self._keep(len(head) + len('true">' if is_text else 'false">'))
        self._value = _TextValue() if is_text else _JsonValue()
        self._grow(f"{', ' if self._keys else '{'}{json_text(key)}: {self._value.opening}")
        self._keys.add(key)
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        """A value, up to its closing tag: the marker, not its spelling."""
        at = 0
        while (at := self._buffer.find("</" + MARK, at)) >= 0:
            if self._buffer.startswith(END_VALUE, at):
                self._flow(at)
                self._keep(len(END_VALUE))
                self._state = self._after_value
                return True
            if END_VALUE.startswith(self._buffer[at:]):
                break
            at += 1
        if at < 0:
            at = len(self._buffer) - next((n for n in (2, 1) if self._buffer.endswith("</"[:n])), 0)
        self._flow(at)
        return False

    def _flow(self, n: int) -> None:
        if n:
            self._grow(self._value.push(spelled(self._keep(n))))

    def _grow(self, text: str) -> None:
        if text:
            self._events.append(Grown(self._index, text))

    def _after_value(self) -> bool:
        begins = self._begins(">\n")
        if begins is None:
            return False
        rest = self._value.rest() if begins else None
        if rest is None:
            return self._break()
        self._keep(2)
        self._grow(rest)
        self._state = self._inside
        return True

    def _break(self) -> bool:
        """The call under way is none: what was kept of it is text, and the block is over."""
        self.malformed = True
        self._events += [Broken(self._index), Said(self._kept_at, "".join(self._kept))]
        self._kept = []
        self._state = self._text
        return True


def _upto(text: str, end: str) -> str | None:
    """`text` before the first `end`; None: it may still come. A marker, or too much text, is nothing: the empty
    string is the caller's error, as a name, and as a key.
    """
    at = text.find(end)
    if at < 0 and len(text) < MOST_HEADER + len(end) and MARK not in text:
        return None
    return text[:at] if 0 <= at <= MOST_HEADER and MARK not in text[:at] else ""


class _TextValue:
    """A value that stands as it is (string="true"): JSON of it as it comes, as `json_text` has it of the whole."""

    opening = '"'

    def push(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def rest(self) -> str | None:
        return '"'


class _JsonValue:
    """A value that stands as JSON (string="false"), as it was written but for white space around it.

    Sent as it comes is what lies inside its outermost brackets or quotes; the rest once the whole is known to be
    JSON. So what was sent of a value that is none never closes what it opened.
    """

    opening = ""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._sent = 0
        self._depth = 0
        self._in_string = self._escaped = False
        self._begun = self._closed = False

    def push(self, text: str) -> str:
        self._whole.append(text)
        if not self._begun:
            text = text.lstrip(SPACE)
            self._begun, self._closed = bool(text), bool(text) and text[0] not in '{["'
        n = 0 if self._closed else self._open_part(text)
        self._sent += n
        return text[:n]

    def _open_part(self, text: str) -> int:
        """How many characters come before the one that closes the value."""
        for i, c in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif c == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = c == "\\"
            elif c in "[{":
                self._depth += 1
            elif c in "]}":
                self._depth -= 1
            self._closed = not self._in_string and self._depth == 0
            if self._closed:
                return i
        return len(text)

    def rest(self) -> str | None:
        """What was not sent yet; None: the value is no JSON."""
        whole = "".join(self._whole).strip(SPACE)
        try:
            json_value(whole, strict=True)
        except ValueError:
            return None
        return whole[self._sent :]


_Value = _TextValue | _JsonValue


class CallStream:
    """`CallParser` on drawn tokens, of content: not of reasoning, and without the token that ends the answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.parser = CallParser()
        self._decoder = StreamDecoder(tokenizer)
        self._marker = tokenizer.added.get(DSML)

    def push(self, token: int) -> list[Event]:
        if token == self._marker:
            return self.parser.push(self._decoder.flush() + MARK)
        return self.parser.push(self._decoder.push(token))

    def finish(self) -> list[Event]:
        return self.parser.push(self._decoder.flush()) + self.parser.finish()
