"""Tokens to text as they come: reasoning apart from content, stop strings cut out, characters whole.

What is sent never has to be taken back. A character waits for its last byte, a possible beginning of a stop string
for the text that decides it. The deltas of a channel, joined, are the text up to the earliest occurrence of any stop
string, however the tokens cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4.model.tokenizer import END_THINK, StreamDecoder, Tokenizer

CONTENT, REASONING = "content", "reasoning"


@dataclass(frozen=True)
class Delta:
    """A piece of one channel, never empty."""

    channel: str
    text: str


class StopFilter:
    """Text in, text that is certain out.

    A stop string counts where it begins: with stops "abcd" and "c", the text "abcd" is cut before its "a", and after
    "abc" nothing is decided yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._first = frozenset(s[0] for s in self._stops)
        self._held = ""
        self.stopped = False

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
        self.stopped = True
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
        stops: looked for in content only.
    """

    def __init__(self, tokenizer: Tokenizer, *, in_reasoning: bool, stops: Sequence[str]) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._end_think = tokenizer.special_id(END_THINK) if tokenizer.has_special(END_THINK) else -1
        self._in_reasoning = in_reasoning
        self._filter = StopFilter(stops)
        self.tokens = 0
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was met: the answer is complete."""
        return self._filter.stopped

    def push(self, token: int) -> list[Delta]:
        """Deltas that became certain with this token."""
        self.tokens += 1
        if not self._in_reasoning:
            return self._content(self._decoder.push(token))
        self.reasoning_tokens += 1
        if token == self._end_think:
            self._in_reasoning = False
            return _delta(REASONING, self._decoder.flush())
        return _delta(REASONING, self._decoder.push(token))

    def finish(self) -> list[Delta]:
        """Deltas that the end of the answer decides; `stopped` may become true here."""
        rest = self._decoder.flush()
        if self._in_reasoning:
            return _delta(REASONING, rest)
        return self._content(rest) + _delta(CONTENT, self._filter.flush() if not self.stopped else "")

    def _content(self, text: str) -> list[Delta]:
        return _delta(CONTENT, self._filter.push(text))


def _delta(channel: str, text: str) -> list[Delta]:
    return [Delta(channel, text)] if text else []
