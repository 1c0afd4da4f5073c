"""From a correction to the one decision that it speaks of: after which tokens another one should have come.

The first token in which the wanted answer leaves the given one. Everything before it must be the same tokens in
both, and those of a prompt followed by an answer; where that does not hold, or where the decision lies in markup, a
correction gives no decision but a reason. Nothing here runs a model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds4.errors import RequestError
from ds4.model.chat import attach_tools, other_turns, prepare, render
from ds4.model.tokenizer import ASSISTANT, DSML, END_THINK, EOS, THINK, Segment, Special, Tokenizer
from ds4.posttrain.corrections import Correction
from ds4.posttrain.log import Problem
from ds4.posttrain.quotes import digests, texts_of

_TAG = re.escape(DSML)
_REGIONS = tuple(
    re.compile(pattern, re.S)
    for pattern in (
        rf"<?/?{_TAG}(?:.*</{_TAG}[^>]*>|.*)",  # calls: to their last closing tag, or open to the end
        rf"{THINK}(?:.*?{END_THINK}|.*)",
        r"<tool_result>(?:.*?</tool_result>|.*)",
    )
)


@dataclass(frozen=True)
class Decision:
    """A decision of the model, told by what came before it.

    Attributes:
        line: of the correction.
        prompt: ids of the prompt.
        answer: ids of the answer before the decision.
        a: the token that was wanted.
        given: the token that was given; None: the answer ended there.
        texts_sha256: of what was said (quotes.py).
    """

    line: int
    request_id: str | None
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    a: int
    given: int | None
    texts_sha256: tuple[str, ...]

    @property
    def position(self) -> int:
        """The place of `a` in prompt and answer, from 0; the logits of the place before it decide."""
        return len(self.prompt) + len(self.answer)


class NoDecision(Exception):
    """Why a correction gives none."""


def decisions(
    corrections: Iterable[Correction], tokenizer: Tokenizer, context: int
) -> tuple[list[Decision], list[Problem]]:
    """A decision a correction, as far as they have one, in order of their lines; of equal ones the first.

    Args:
        context: tokens that the model takes.
    """
    found: list[Decision] = []
    problems: list[Problem] = []
    for correction in corrections:
        try:
            found.append(decision(correction, tokenizer, context))
        except NoDecision as e:
            problems.append(Problem(correction.line, str(e)))
    agreed, refused = _without_contradictions(found)
    return agreed, sorted([*problems, *refused], key=lambda p: p.line)


def decision(c: Correction, tokenizer: Tokenizer, context: int) -> Decision:
    """The decision of one correction.

    Raises:
        NoDecision: it has none, and why.
    """
    try:
        if prepare(c.messages)[1]:
            raise NoDecision("has images in its messages, which a request could not have")
        told = attach_tools(c.messages, c.tools)
        segments = render(told, thinking=c.thinking, effort=c.effort, tool_text=tokenizer.tool_text)
        prompt = tokenizer.encode_segments(segments, spell_missing=True)
    except RequestError as e:
        raise NoDecision(f"has messages that no request could have: {e}") from None
    except RecursionError:
        raise NoDecision("has messages that are nested too deep") from None
    head = _reasoning(c, segments)
    given, wanted = (_answer(text, head, segments, prompt, tokenizer) for text in (c.given, c.wanted))
    drawn, ended = _drawn(c, tokenizer, given)
    if head and c.drawn is not None:  # the answer that was wanted comes after the reasoning as it was drawn
        wanted = _after_reasoning(drawn, c.wanted, tokenizer)
    p = _first_difference(drawn, wanted)
    _check_tokens(c, tokenizer, head, drawn, wanted, p, ended)
    if len(prompt) + p + 1 > context:
        raise NoDecision(f"decides at token {len(prompt) + p}; the model's context has {context}")
    texts = [*texts_of({"messages": c.messages}), c.given, c.wanted, *([c.reasoning] if c.reasoning else [])]
    return Decision(
        c.line, c.request_id, tuple(prompt), tuple(wanted[:p]), wanted[p], drawn[p] if p < len(drawn) else None,
        tuple(digests(texts)),
    )  # fmt: skip


def _reasoning(c: Correction, segments: Sequence[Segment]) -> list[Segment]:
    """What the answer begins with where the prompt ends inside a reasoning block."""
    marks = [s.name for s in segments if isinstance(s, Special) and s.name in (THINK, END_THINK, ASSISTANT)]
    if not marks or marks[-1] != THINK:
        return []
    if c.reasoning is None:
        raise NoDecision("is of a request that thinks, and does not say what: name the log, or give its reasoning")
    return [c.reasoning, Special(END_THINK)]


def _answer(
    text: str, head: Sequence[Segment], segments: Sequence[Segment], prompt: Sequence[int], tokenizer: Tokenizer
) -> list[int]:
    """Ids of an answer, which must be those that it has when it is read together with its prompt."""
    ids = tokenizer.encode_segments([*head, text], spell_missing=True)
    if tokenizer.encode_segments([*segments, *head, text], spell_missing=True) != [*prompt, *ids]:
        raise NoDecision("tokenizes differently when prompt and answer are one text: there is no place between them")
    return ids


def _drawn(c: Correction, tokenizer: Tokenizer, given: list[int]) -> tuple[list[int], bool]:
    """The answer's tokens as they were drawn, or else as its text has them; whether a token of its own ended it."""
    if c.drawn is None:
        return given, True
    size = tokenizer.vocab_size
    bad = next((i for i in c.drawn if not 0 <= i < size), None)
    if bad is not None:
        raise NoDecision(f"was drawn as token {bad}, which this model does not have; use the base that answered")
    enders = {*other_turns(tokenizer), tokenizer.added.get(EOS, -1)}
    ended = bool(c.drawn) and c.drawn[-1] in enders
    drawn = list(c.drawn[:-1] if ended else c.drawn)
    return drawn, ended or not c.cut


def _after_reasoning(drawn: Sequence[int], wanted: str, tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.special_id(END_THINK)
    if end not in drawn:
        raise NoDecision("ended inside its reasoning: no word of an answer was decided")
    return [*drawn[: drawn.index(end) + 1], *tokenizer.encode(wanted)]


def _first_difference(drawn: Sequence[int], wanted: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(drawn, wanted)) if x != y), min(len(drawn), len(wanted)))


def _check_tokens(
    c: Correction, tokenizer: Tokenizer, head: Sequence[Segment], drawn: Sequence[int], wanted: Sequence[int], p: int,
    ended: bool,
) -> None:  # fmt: skip
    """Whether the two answers part at token `p` because their texts part there.

    Raises:
        NoDecision: they part elsewhere, or at no place where a word of the answer is decided.
    """
    spelled, text = _bytes(drawn, tokenizer), _bytes(wanted, tokenizer)
    before = "".join(s.name if isinstance(s, Special) else s for s in head).encode()
    said = before + c.given.encode()
    if c.drawn is not None and not _same_text(spelled, said):
        raise NoDecision("was drawn as tokens that do not spell its answer; use the base that answered")
    parting = next((i for i, (x, y) in enumerate(zip(spelled, text)) if x != y), min(len(spelled), len(text)))
    begin = len(_bytes(wanted[:p], tokenizer))
    end = max(begin + len(_bytes(part[p : p + 1], tokenizer)) for part in (drawn, wanted))
    for answer in (c.given, c.wanted):
        for first, last in _markup(answer, tokenizer):
            if begin < len(before) + last and end > len(before) + first:
                inside = answer.encode()[first:last].decode()
                raise NoDecision(f"decides inside markup, {inside!r:.60}")
    if p == len(wanted):
        raise NoDecision(
            "wants the answer to end where it went on: that is decided by a special token, not by a word"
        )
    if any(tokenizer.is_added(part[p]) for part in (drawn, wanted) if p < len(part)):
        raise NoDecision("decides at a special token, not at a word")
    if end <= parting:
        raise NoDecision(
            f"tokenizes differently before the answers part: {_spell(drawn, p, tokenizer)} was given and "
            f"{_spell(wanted, p, tokenizer)} wanted, which are the same letters"
        )
    if p == len(drawn) and not ended:
        raise NoDecision("was cut at its token limit before the place that it speaks of: nothing was decided there")


def _same_text(spelled: bytes, said: bytes) -> bool:
    """Whether drawn tokens are those of a text; they may go on, where a stop string ended it, and a character that
    was never whole is a replacement in the text.
    """
    return spelled.startswith(said) or spelled.decode(errors="replace").startswith(said.decode())


def _bytes(ids: Iterable[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(tokenizer.token_bytes(i) for i in ids)


def _spell(ids: Sequence[int], p: int, tokenizer: Tokenizer) -> str:
    return repr(tokenizer.decode(ids[p : p + 1]))


def _markup(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Where a text is markup, in bytes of its UTF-8: calls, reasoning, tool results, and names of added tokens."""
    spans = [m.span() for region in _REGIONS for m in region.finditer(text)]
    at = 0
    for segment in tokenizer.split_added(text):
        name = segment.name if isinstance(segment, Special) else segment
        if isinstance(segment, Special):
            spans.append((at, at + len(name)))
        at += len(name)
    return [(len(text[:i].encode()), len(text[:j].encode())) for i, j in spans]


def _without_contradictions(found: Sequence[Decision]) -> tuple[list[Decision], list[Problem]]:
    """Decisions that no other correction speaks against, equal ones once.

    Two contradict each other that want different tokens after the same prompt and the same tokens; both are left out,
    as nobody can say which is right. Two that correct one answer in two places do not.
    """
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Decision]] = defaultdict(list)
    for d in found:
        places[d.prompt, d.answer].append(d)
    problems = []
    for first, *more in places.values():
        if all(d.a == first.a for d in more):
            problems += [Problem(d.line, f"repeats line {first.line}: the same word in the same place") for d in more]
            continue
        for d in (first, *more):
            others = ", ".join(str(o.line) for o in (first, *more) if o.a != d.a)
            problems.append(Problem(d.line, f"contradicts line {others}: another word in the same place"))
    out = {p.line for p in problems}
    return [d for d in found if d.line not in out], problems
