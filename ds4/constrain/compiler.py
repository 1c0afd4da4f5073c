"""Grammars compiled for a vocabulary by llguidance, within limits, and kept for those who ask again."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ds4.constrain.calls import MOST_GRAMMAR, Calls, calls_grammar
from ds4.constrain.content import Content, json_rule
from ds4.constrain.matcher import Compiled, Grammar, Marks
from ds4.constrain.schema import fault_of, refusal
from ds4.errors import CapacityError, RequestError
from ds4.model.chat import other_turns
from ds4.model.tokenizer import DSML, END_THINK, EOS, Tokenizer

KEPT = 16  # compiled grammars
KEPT_CHARS = 1 << 21  # of their texts together: what is compiled takes some hundred bytes a character
MOST_STATES = 200_000  # of a lexer, half a KB each: a string of 25,000 characters whose length is bounded
STACK_BYTES = 512 << 20  # of the compiling thread, reserved and not used: rules may lead from one to the next, deeply

# A mask is what the grammar says: else, where only one text can follow, only the tokens that it is usually cut into
# would be allowed, which the model knows better. Behind the grammar, so that complaints count its own lines.
OPEN = '\n%llguidance {"no_forcing": true}\n'

T = TypeVar("T")


class Compiler:
    """What requests ask for, compiled. Thread-safe; one thing is compiled at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._for: Tokenizer | None = None
        self._vocabulary: LLTokenizer | None = None
        self._marks: Marks | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    def compile(
        self, tokenizer: Tokenizer, *, content: Content | None = None, calls: Calls | None = None,
        forced: bool = True, in_reasoning: bool = False, budget: int | None = None,
    ) -> Compiled | None:  # fmt: skip
        """What an answer has to obey; None: nothing.

        Args:
            content: what its text is.
            calls: the tools of a forced call, which then is all of the answer; with `forced` false the answer is such
                a call or `content`, as the model likes.
            in_reasoning: it begins with reasoning, which no grammar is about.
            budget: reasoning tokens, after which the block is closed.

        Raises:
            RequestError: names the field and what of it cannot be compiled.
        """
        if not in_reasoning:
            budget = None
        if content is None and calls is None and budget is None:
            return None
        with self._lock:
            self._learn(tokenizer)
            assert self._marks is not None
            grammar = None if content is None and calls is None else self._grammar(tokenizer, content, calls, forced)
            return Compiled(self._marks, grammar, in_reasoning, budget)

    def learn(self, tokenizer: Tokenizer) -> None:
        """Read a vocabulary, which else the first one who asks waits for: a second for 129,280 tokens."""
        with self._lock:
            self._learn(tokenizer)

    def _learn(self, tokenizer: Tokenizer) -> None:
        if self._for is not tokenizer:
            self._for, self._vocabulary = tokenizer, vocabulary(tokenizer)
            self._marks = Marks(
                tokenizer.vocab_size, tokenizer.special_id(EOS), tokenizer.added.get(END_THINK),
                other_turns(tokenizer),
            )  # fmt: skip
            self._kept.clear()

    def _grammar(self, tokenizer: Tokenizer, content: Content | None, calls: Calls | None, forced: bool) -> Grammar:
        if calls is None:
            assert content is not None
            own = content
            return self._compiled(own.grammar, lambda: own.grammar, lambda fault: _complaint_of(own, fault))
        if not tokenizer.has_special(DSML):
            raise RequestError(
                f"{calls.field}: this model's vocabulary has no {DSML}, so no call can be forced", calls.field,
                "unsupported_parameter",
            )  # fmt: skip
        beside = None if forced else content

        def text() -> str:
            block, rules = calls_grammar(
                calls, tokenizer.special_id(DSML), self._faults(), lenient=beside is not None
            )
            if beside is None:
                return f"start: {block}\n{rules}"
            self._grammar(tokenizer, beside, None, True)  # its own faults first
            main = f"start: content | {block}\ncontent: @content\n{rules}"
            grammars = [{"lark_grammar": main + OPEN}, {"name": "content", "lark_grammar": beside.grammar}]
            return json.dumps({"grammars": grammars}, ensure_ascii=False)

        key = json.dumps([calls.declared, calls.name, calls.one, beside and beside.grammar], ensure_ascii=False)
        return self._compiled(key, text, lambda fault: _refused(calls.field, fault))

    def _faults(self) -> Callable[[Any], str]:
        """What the compiler has against a schema, "" for nothing; the same one is compiled once."""
        known: dict[str, str] = {}

        def fault(schema: Any) -> str:
            rule = json_rule(schema, canonical=True)
            if rule not in known:
                known[rule] = _deep(lambda: self._made("start: " + rule).get_error())
            return known[rule]

        return fault

    def _compiled(self, key: str, written: Callable[[], str], refused: Callable[[str], RequestError]) -> Grammar:
        """What `key` stands for, compiled before, or `written` now."""
        kept = self._kept.pop(key, None)
        if kept is not None and not kept.worn:
            self._kept[key] = kept
            return kept
        if len(key) > MOST_GRAMMAR or len(text := written()) > MOST_GRAMMAR:
            raise refused(f"it makes a grammar of more than {MOST_GRAMMAR} characters")
        made = _deep(lambda: self._made(text))
        if made.is_error():
            raise refused(made.get_error())
        self._kept[key] = Grammar(made)
        while len(self._kept) > KEPT or (len(self._kept) > 1 and sum(map(len, self._kept)) > KEPT_CHARS):
            self._kept.popitem(last=False)
        return self._kept[key]

    def _made(self, text: str) -> LLMatcher:
        """A matcher at its start; one that is in error says why. Its first mask is tried, which finds more faults."""
        assert self._vocabulary is not None
        limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        text = text if text.startswith("{") else text + OPEN
        made = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()
        return made


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """The tokens' bytes; added tokens, and ids without one, are none of a text's."""
    return LLTokenizer(_Bytes(tokenizer))  # type: ignore[arg-type]


class _Bytes:
    """A tokenizer as the library looks at one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.special_id(EOS)
        ids = range(tokenizer.vocab_size)
        pieces = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_added(i) or not pieces[i]]
        special = frozenset(self.special_token_ids)
        self.tokens = [tokenizer.tokens[i].encode() if i in special else pieces[i] for i in ids]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


def _complaint_of(content: Content, fault: str) -> RequestError:
    if content.json is None:
        return _refused(content.field, fault)
    return refusal(fault_of(fault, content.json), content.field)


def _refused(field: str, fault: str) -> RequestError:
    lines = [line.strip() for line in fault.strip().split("\n") if line.strip()]
    lines[1:] = [line for line in lines[1:] if line.startswith("error: ")]  # the rest shows where in the grammar
    if lines and lines[0].startswith("NoExtension"):  # what its first mask says of rules in a circle
        lines = ['a rule that "start" needs has no end: every alternative of it leads back to itself']
    why = " ".join(lines)[:300] or "it cannot be compiled"
    return RequestError(f"{field}: {why}", field, "unsupported_grammar")


def _deep(work: Callable[[], T]) -> T:
    """`work` on a stack that the longest allowed chain of rules does not fill: the library walks it by recursion."""
    out: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            out.append(work())
        except BaseException as e:
            failed.append(e)

    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name="compile")
        thread.start()
    except RuntimeError as e:
        raise CapacityError(
            f"no room for the {STACK_BYTES >> 20} MB of addresses that compiling a grammar reserves ({e})"
        ) from e
    finally:
        threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return out[0]
