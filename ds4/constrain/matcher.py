"""A compiled grammar and the state of one answer under it, as the engine asks for it (ds4/engine/constraint.py).

An answer has up to two parts: reasoning, whose tokens are free until its budget is spent, and content, which follows
the grammar from its first token to the end of sentence. `</think>` leads from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ds4.errors import Ds4Error, RequestError

Row = NDArray[np.uint32]
MOST_TOKENS = 32_768  # of answers through one grammar, then it is compiled anew


@dataclass(frozen=True)
class Marks:
    """Ids of a vocabulary of `size` that an answer turns on; `close` is `</think>`, if there is one; `turns` begin
    another turn, which no answer holds.
    """

    size: int
    end: int
    close: int | None
    turns: frozenset[int]

    @property
    def words(self) -> int:
        """u32 words of a mask."""
        return -(-self.size // 32)

    def only(self, token: int) -> Row:
        """u32 [words] that allows one token."""
        row = np.zeros(self.words, np.uint32)
        row[token // 32] = np.uint32(1 << token % 32)
        return row

    def all_but(self, tokens: Sequence[int]) -> Row:
        """u32 [words] that allows every token but these."""
        row = np.full(self.words, 2**32 - 1, np.uint32)
        for token in tokens:
            row[token // 32] &= np.uint32(2**32 - 1 - (1 << token % 32))
        return row


@dataclass
class Grammar:
    """A matcher at its start, which answers copy. They share what its lexer has seen, which grows with them: where
    lengths are counted, by up to ten states of half a KB a character.

    Attributes:
        tokens: of answers so far.   spoiled: one gave up, perhaps because there were too many states.
    """

    matcher: LLMatcher
    tokens: int = 0
    spoiled: bool = False

    @property
    def worn(self) -> bool:
        """Whether the next answer should have one of its own."""
        return self.spoiled or self.tokens > MOST_TOKENS


@dataclass(frozen=True)
class Compiled:
    """What an answer has to obey; many answers may start from one.

    Attributes:
        grammar: of the content, at its start; None: any text.
        reasons: the answer begins with reasoning.
        budget: reasoning tokens after which only `</think>` may follow; None: as many as it takes.
    """

    marks: Marks
    grammar: Grammar | None
    reasons: bool = False
    budget: int | None = None
    _open: Row = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_open", self.marks.all_but((self.marks.end, *self.marks.turns)))

    def start(self) -> Answer:
        """The state of an answer without a token."""
        return Answer(self, self._open)


class Answer:
    """The state of one answer. Not thread-safe."""

    def __init__(self, of: Compiled, open_row: Row) -> None:
        """`open_row`: what reasoning may hold, as something has to follow it."""
        self._of, self._marks, self._open = of, of.marks, open_row
        self._matcher = None if of.grammar is None else of.grammar.matcher.deep_copy()
        self._parts = ""  # a letter a token: r reasoning, t its closing tag, c content, e the end of sentence
        self._failed: Ds4Error | None = None  # for good

    # -- as TokenConstraint

    def rows(self, ahead: Sequence[int]) -> NDArray[np.uint32] | None:
        """TokenConstraint.rows."""
        rows: list[Row | None] = []
        before = len(self._parts)
        try:
            for token in ahead:
                rows.append(self._row())
                if not self._allows(token):
                    break
                self._advance(token)
            else:
                rows.append(self._row())
        except Ds4Error as e:
            self._failed = e
            rows.append(self._marks.only(self._marks.end))
        finally:
            self.rollback(len(self._parts) - before)
        rows += [None] * (1 + len(ahead) - len(rows))
        if all(row is None for row in rows):
            return None
        free = self._marks.all_but(())
        return np.stack([free if row is None else row for row in rows])

    def valid(self, ahead: Sequence[int]) -> int:
        """TokenConstraint.valid."""
        before = len(self._parts)
        try:
            for i, token in enumerate(ahead):
                if not self._allows(token):
                    return i
                self._advance(token)
            return len(ahead)
        except Ds4Error as e:
            self._failed = e
            return 0
        finally:
            self.rollback(len(self._parts) - before)

    def advance(self, token: int) -> None:
        """TokenConstraint.advance."""
        if self._failed is not None:
            raise self._failed
        if not self._allows(token):
            raise Ds4Error(f"token {token} after {len(self._parts)} of the answer is not what its grammar allows")
        self._advance(token)
        if self._of.grammar is not None:
            self._of.grammar.tokens += 1

    def _advance(self, token: int) -> None:
        if self._reasoning:
            self._parts += "t" if token == self._marks.close else "r"
        elif self._ended or token == self._marks.end:
            self._parts += "e"
        else:
            if self._matcher is not None and not self._matcher.consume_token(token):
                raise self._gave_up()
            self._parts += "c"

    def rollback(self, count: int) -> None:
        """TokenConstraint.rollback."""
        if count <= 0:
            return
        taken = self._parts[-count:].count("c")
        if self._matcher is not None and taken and not self._matcher.rollback(taken):
            self._failed = self._failed or self._gave_up()
        self._parts = self._parts[:-count]

    # -- what is allowed next

    @property
    def _reasoning(self) -> bool:
        return self._of.reasons and (not self._parts or self._parts[-1] == "r")

    @property
    def _ended(self) -> bool:
        return self._parts[-1:] == "e"

    @property
    def _spent(self) -> bool:
        return self._of.budget is not None and len(self._parts) >= self._of.budget

    def _row(self) -> Row | None:
        """u32 [words] of allowed tokens; None: all."""
        marks, matcher = self._marks, self._matcher
        if self._reasoning:
            if self._spent and marks.close is not None:
                return marks.only(marks.close)
            return self._open
        if matcher is None:
            return None
        if self._ended or matcher.is_stopped():
            if matcher.is_error():
                raise self._gave_up()
            return marks.only(marks.end)
        row = np.zeros(marks.words, np.uint32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise self._gave_up()
        return row

    def _allows(self, token: int) -> bool:
        marks, matcher = self._marks, self._matcher
        if self._reasoning:
            if self._spent and marks.close is not None:
                return token == marks.close
            return token != marks.end and token not in marks.turns
        if matcher is None:
            return True
        if self._ended:
            return token == marks.end
        if token == marks.end:
            return matcher.is_accepting()
        return not matcher.is_stopped() and matcher.validate_tokens([token]) == 1

    def _gave_up(self) -> RequestError:
        assert self._matcher is not None and self._of.grammar is not None
        self._of.grammar.spoiled = True
        why = self._matcher.get_error().strip().split("\n")[0][:300]
        return RequestError(
            f"the answer's grammar takes too much to go on: {why or 'a token that it does not allow'}",
            code="grammar_too_complex",
        )
