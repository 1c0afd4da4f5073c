"""Tokens to text as they come: reasoning apart from content, calls taken out, stop strings cut out, characters whole.

What is sent never has to be taken back. A character waits for its last byte, a possible beginning of a stop string
for the text that decides it. The deltas of a channel, joined, are the text up to the earliest occurrence of any stop
string, however the tokens cut it. A token's log-probabilities go out once, with the text that the token begins in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds4.model.call_stream import MARK, Begun, CallParser, Ended, Event, Grown, Said, spelled
from ds4.model.tokenizer import DSML, END_THINK, StreamDecoder, Tokenizer
from ds4.server.request import ServedToken

CONTENT, REASONING = "content", "reasoning"
GOING_ON = frozenset([b"", *(bytes([b]) for b in range(0x80, 0xC0))])  # bytes that begin no character, or none at all


@dataclass(frozen=True)
class Told:
    """A token and its log-probabilities, the model's own.

    Attributes:
        offset: characters of its channel before the one that the token begins in.
        top: (id, log-probability) of the likeliest, largest first.
    """

    token: int
    offset: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Delta:
    """A piece of one channel: some text, and where they were asked for the log-probabilities of tokens that begin in
    it. Without text only at the end, for tokens that have none.
    """

    channel: str
    text: str
    told: tuple[Told, ...] = ()


@dataclass(frozen=True)
class CallDelta:
    """A piece of call `index`.

    Attributes:
        name: with the first piece, as the model wrote it.
        text: of its arguments.
        state: "complete" with the last piece of a call; "broken" if it turned out to be none, and its markup comes
            as content.
    """

    index: int
    name: str | None = None
    text: str = ""
    state: str = ""

    def joined(self, more: CallDelta) -> CallDelta:
        """This piece and the next one of the same call."""
        return CallDelta(self.index, self.name, self.text + more.text, more.state)


Piece = Delta | CallDelta


class StopFilter:
    """Text in, text that is certain out.

    A stop string counts where it begins: with stops "abcd" and "c", the text "abcd" is cut before its "a", and after
    "abc" nothing is decided yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first = frozenset(s[0] for s in self._stops)
        self._held = ""
        self.met: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        return self.met is not None

    def push(self, text: str) -> str:
        """Text that became certain; nothing more once `stopped`."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = self._found()
        undecided = self._undecided()
        if 0 <= found <= undecided:
            return self._stop(found)
        certain, self._held = self._held[:undecided], self._held[undecided:]
        return certain

    def flush(self) -> str:
        """The text ends here: what was held back is text, up to a stop string that waited for an earlier one."""
        found = self._found()
        if found >= 0:
            return self._stop(found)
        rest, self._held = self._held, ""
        return rest

    def _stop(self, at: int) -> str:
        self.met = next(s for s in self._stops if self._held.startswith(s, at))
        text, self._held = self._held[:at], ""
        return text

    def _found(self) -> int:
        """Where the earliest stop string begins; -1: nowhere."""
        places = [p for p in map(self._held.find, self._stops) if p >= 0]
        return min(places, default=-1)

    def _undecided(self) -> int:
        """Where the earliest unfinished stop string may begin; the length if nowhere."""
        n = len(self._held)
        for i in range(max(0, n - max(map(len, self._stops)) + 1), n):
            if self._held[i] in self._first:
                tail = self._held[i:]
                if any(len(s) > len(tail) and s.startswith(tail) for s in self._stops):
                    return i
        return n


class TextStream:
    """The text of one answer.

    Args:
        in_reasoning: the prompt ended inside a reasoning block; the model's own `</think>` token ends it. The same
            spelling made of other tokens is text.
        stops: looked for in content only, on each side of a call by itself.
        calls: those in the content come as such; else whatever is written is text.
        one_call: the answer is complete with its first call.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, in_reasoning: bool, stops: Sequence[str], calls: bool = False,
        one_call: bool = False,
    ) -> None:  # fmt: skip
        self._decoder, self._tokenizer = StreamDecoder(tokenizer), tokenizer
        self._end_think = tokenizer.special_id(END_THINK) if tokenizer.has_special(END_THINK) else -1
        self._in_reasoning = in_reasoning
        self._filter = StopFilter(stops)
        self._calls = CallParser() if calls else None
        self._marker = tokenizer.added.get(DSML, -1)
        self._one_call, self._complete, self._broken = one_call, 0, 0  # calls so far
        self._decoded = self._sent = 0  # characters of the channel; with calls, decoded are those of the parser
        self._placed = self._said = 0  # with calls: characters of content, and of the parser up to its end
        self._in_calls: deque[Told] = deque()  # by the parser's characters: whether of content or of a call
        self._untold: deque[Told] = deque()
        self.tokens = 0
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was met, or the only call that may be made: the answer is complete."""
        return self._filter.stopped or (self._one_call and self._complete > 0)

    @property
    def stop(self) -> str | None:
        """The stop string that was met; of several that begin in one place, the one that was asked for first."""
        return self._filter.met

    @property
    def called(self) -> bool:
        """The answer has calls, and every one that was begun is complete."""
        return self._complete > 0 and self._broken == 0

    def push(self, token: int, drawn: ServedToken | None = None) -> list[Piece]:
        """Deltas that became certain with this token. `drawn`: it with its log-probabilities, to be told.

        The token that ends the reasoning has no text and is told in neither channel; tokens of calls are not told.
        Of the tokens of a stop string those are told that begin in text before it.
        """
        self.tokens += 1
        self.reasoning_tokens += self._in_reasoning
        if self._in_reasoning and token == self._end_think:
            rest = self._reasoning(self._decoder.flush(), end=True)
            self._in_reasoning, self._decoded, self._sent = False, 0, 0
            return [*rest]
        # a first byte that goes on with no character ends the one before, whole or not: the token begins after it
        text = "" if self._tokenizer.token_bytes(token)[:1] in GOING_ON else self._decoder.flush()
        calls = self._calls is not None and not self._in_reasoning
        if drawn is not None:
            told = Told(token, self._decoded + len(text), drawn.logprob, drawn.top)
            (self._in_calls if calls else self._untold).append(told)
        text += MARK if calls and token == self._marker else self._decoder.push(token)
        return [*self._reasoning(text)] if self._in_reasoning else self._content(text)

    def finish(self) -> list[Piece]:
        """Deltas that the end of the answer decides; `stopped` may become true here."""
        rest = self._decoder.flush()
        if self._in_reasoning:
            return [*self._reasoning(rest, end=True)]
        deltas = self._content(rest)
        if self._calls is not None:
            deltas += self._events(self._calls.finish())
        if self.stopped:
            return deltas
        if self._said == self._decoded:  # it ends in content: tokens without any text are told too
            self._untold += self._in_calls
        return deltas + [*self._flushed(end=True)]

    def _reasoning(self, text: str, *, end: bool = False) -> list[Delta]:
        self._decoded += len(text)
        return self._delta(REASONING, text, end=end)

    def _content(self, text: str) -> list[Piece]:
        self._decoded += len(text)
        if self._calls is None:
            return [*self._delta(CONTENT, self._filter.push(text))]
        return self._events(self._calls.push(text)) if text else []

    def _events(self, events: Sequence[Event]) -> list[Piece]:
        out: list[Piece] = []
        for event in events:
            if self.stopped:
                break
            if isinstance(event, Said):
                out += self._text_beside_calls(event)
            elif isinstance(event, Begun):
                out += self._flushed()
                out += [] if self.stopped else [CallDelta(event.index, event.name)]
            elif isinstance(event, Grown):
                out.append(CallDelta(event.index, text=event.text))
            elif isinstance(event, Ended):
                self._complete += 1
                out.append(CallDelta(event.index, state="complete"))
            else:
                self._broken += 1
                out.append(CallDelta(event.index, state="broken"))
        return out

    def _text_beside_calls(self, event: Said) -> list[Delta]:
        """Text of the parser. Tokens that began before it were those of a call."""
        while self._in_calls and self._in_calls[0].offset < event.at + len(event.raw):
            told = self._in_calls.popleft()
            if told.offset >= event.at:
                offset = self._placed + len(spelled(event.raw[: told.offset - event.at]))
                self._untold.append(replace(told, offset=offset))
        text = event.text
        self._placed, self._said = self._placed + len(text), event.at + len(event.raw)
        return self._delta(CONTENT, self._filter.push(text))

    def _flushed(self, *, end: bool = False) -> list[Delta]:
        """What the filter held back, as no text follows that could decide it."""
        rest = self._filter.flush()
        return self._delta(CONTENT, rest, end=end and not self._filter.stopped)

    def _delta(self, channel: str, text: str, *, end: bool = False) -> list[Delta]:
        """`end`: no more text of this channel comes, so tokens without any are told too."""
        self._sent += len(text)
        told = []
        while self._untold and (end or self._untold[0].offset < self._sent):
            told.append(self._untold.popleft())
        return [Delta(channel, text, tuple(told))] if text or told else []
