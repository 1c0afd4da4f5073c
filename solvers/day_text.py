"""The text of logged requests, as a refit reads it: what was asked and what was answered, in tokens.

A request is one window: its prompt as the server makes it, then the answer's tokens as they were drawn. A window that
is too long keeps its end, where the answer is, behind a begin-of-sentence token. Text that another request repeats
counts once: a window is left out that another one begins with, as a conversation's first turns are in its later ones.

Requests of one conversation (chats that begin with the same messages as far as the first of a user, completions
whose prompt goes on from another's) are one document, so that what is held out by document was not fitted in part.
Rows that cannot be read are reported with their line and why.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.corpus import Document, Domain
from ds4.errors import RequestError, UsageError
from ds4.model.tokenizer import END_THINK, EOS, Tokenizer
from ds4.posttrain.corrections import Correction
from ds4.posttrain.log import Logged, Problem
from ds4.server.fields import Fields
from ds4.server.openai import read_chat, read_completion
from ds4.server.request import Limits, ServedModel
from rulers.text import SHORTEST, Text
from solvers.workfolder import MANIFEST

SOURCE = "requests"  # of every document here
GENERAL = "general"
SLICE = "fit"  # of a domain whose text stands beside


@dataclass(frozen=True)
class Unread:
    """A row that gives no text, and why."""

    path: Path
    problem: Problem

    def __str__(self) -> str:
        return f"{self.path.name}, line {self.problem.line}: {self.problem.reason}"


@dataclass(frozen=True)
class DayText:
    """Windows and their documents (`Text.documents` counts them; a document's id is its first request's).

    Attributes:
        requests: how many are in it. repeated: whose text others have. passed_over: for which there was no room.
        unread: rows that give no text.
    """

    text: Text
    documents: tuple[Document, ...]
    requests: int
    repeated: int
    passed_over: int
    unread: tuple[Unread, ...]


@dataclass
class _Window:
    """One request. `opening`: what tells its conversation from others, of a chat; None: see `_conversations`."""

    request: str
    opening: str | None
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    conversation: int = field(default=-1)


def day_text(
    logged: Sequence[Logged],
    model: ServedModel,
    *,
    length: int,
    tokens: int | None = None,
    wanted: Mapping[str, Sequence[int]] | None = None,
) -> DayText:
    """The text of some requests of a log, in the order in which they are given, conversations together.

    Args:
        model: reads requests as the server does; no weights are asked for.
        length: tokens of a window at most.
        tokens: at most so many in all, requests taken evenly over those that there are; None: all.
        wanted: request id -> the answer's tokens that are to stand in place of the given ones (`wanted_answers`).

    Raises:
        UsageError: a length or number of tokens that makes no window, or no request that gives any text.
    """
    if length < SHORTEST:
        raise UsageError(f"windows of {length} tokens are too short; at least {SHORTEST}")
    if tokens is not None and tokens < SHORTEST:
        raise UsageError(f"{tokens} tokens are too few; at least {SHORTEST}")
    found: list[_Window] = []
    unread: list[Unread] = []
    for entry in logged:
        try:
            found.append(_window(entry, model, length, (wanted or {}).get(entry.id)))
        except (RequestError, ValueError) as e:
            unread.append(Unread(entry.path, Problem(entry.line, str(e))))
        except RecursionError:
            unread.append(Unread(entry.path, Problem(entry.line, "has messages that are nested too deep")))
    if not found:
        why = f": {unread[0]}" if unread else ""
        raise UsageError(f"{len(logged)} requests, none of which gives text to refit on{why}")
    _conversations(found)
    once = _without_repeats(found)
    chosen = _evenly(once, tokens)
    if not chosen:
        raise UsageError(f"none of {len(once)} requests fits into {tokens} tokens; take more, or a smaller length")
    numbers: dict[int, int] = {}
    documents: list[Document] = []
    for window in chosen:
        if window.conversation not in numbers:
            numbers[window.conversation] = len(documents)
            documents.append(Document(window.request, SOURCE, ""))
    chosen = sorted(chosen, key=lambda w: numbers[w.conversation])  # stable: each conversation in its order
    text = Text.of([w.ids for w in chosen], [numbers[w.conversation] for w in chosen])
    left_out = len(found) - len(once), len(once) - len(chosen)
    return DayText(text, tuple(documents), len(chosen), *left_out, tuple(unread))


def wanted_answers(
    corrections: Sequence[Correction], tokenizer: Tokenizer
) -> tuple[dict[str, tuple[int, ...]], list[Problem]]:
    """Request id -> tokens of the answer that was wanted, its end too, behind the reasoning as it was drawn; and the
    corrections that give none.
    """
    found: dict[str, tuple[int, ...]] = {}
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    end = tokenizer.added.get(END_THINK, -1)
    eos = [tokenizer.added[EOS]] if tokenizer.has_special(EOS) else []
    for c in corrections:
        drawn = c.drawn or ()
        if c.request_id is None:
            problems.append(Problem(c.line, "names no request whose text it could stand in"))
        elif c.request_id in found:
            problems.append(
                Problem(c.line, f"corrects what line {lines[c.request_id]} corrects: the first one counts")
            )
        elif c.reasoning is not None and end not in drawn:
            problems.append(Problem(c.line, "is of an answer that ended inside its reasoning, or was not logged"))
        else:
            head = drawn[: drawn.index(end) + 1] if end in drawn else ()
            answer = tokenizer.encode_segments([c.wanted], spell_missing=True)
            found[c.request_id], lines[c.request_id] = (*head, *answer, *eos), c.line
    return found, problems


def _window(entry: Logged, model: ServedModel, length: int, wanted: Sequence[int] | None) -> _Window:
    """One request's.

    Raises:
        RequestError, ValueError: why it has none.
    """
    row = entry.row
    answer = row.get("answer_ids") if wanted is None else list(wanted)
    if not isinstance(answer, list) or not answer:
        raise ValueError("has no answer_ids: which tokens were answered is not known")
    try:
        given = [model.tokenizer.check_id(i) for i in answer]
    except RequestError as e:
        raise ValueError(f"has an answer that this model could not give ({e}); use the base that answered") from None
    opening: str | None = None
    if "messages" in row:
        fields = {"messages": row["messages"], "thinking": row.get("thinking"), "reasoning_effort": row.get("effort"),
                  "tools": row.get("tools")}  # fmt: skip
        prompt = tuple(read_chat(Fields(fields), model, Limits()).prompt_ids)
        opening = _opening(row["messages"])
    elif "prompt" in row:
        prompt = tuple(read_completion(Fields({"prompt": row["prompt"]}), model, Limits()).prompt_ids)
    else:
        raise ValueError("has neither messages nor a prompt")
    ids = (*prompt, *given)
    if len(ids) > length:
        ids = (model.config.bos_token_id, *ids[len(ids) - length + 1 :])
    return _Window(entry.id, opening, prompt, ids)


def _opening(messages: Sequence[Mapping[str, Any]]) -> str:
    """The messages up to the first of a user, as one text."""
    roles = [m.get("role") for m in messages]
    n = roles.index("user") + 1 if "user" in roles else len(messages)
    return json.dumps(messages[:n], sort_keys=True)


def _conversations(windows: Sequence[_Window]) -> None:
    """Number them in place."""
    numbers: dict[str, int] = {}
    count = itertools.count()
    for window in windows:
        if window.opening is not None:
            if window.opening not in numbers:
                numbers[window.opening] = next(count)
            window.conversation = numbers[window.opening]
    leader: _Window | None = None
    for window in sorted((w for w in windows if w.opening is None), key=lambda w: w.prompt):
        # sorted, all that go on from a prompt stand behind it, before any that does not
        if leader is None or window.prompt[: len(leader.prompt)] != leader.prompt:
            leader = window
            window.conversation = next(count)
        else:
            window.conversation = leader.conversation


def _without_repeats(windows: Sequence[_Window]) -> list[_Window]:
    """Those that no other one begins with; of equal ones the first."""
    order = sorted(range(len(windows)), key=lambda i: (windows[i].ids, -i))  # of equal ones the first comes last
    gone = {
        i
        for i, follower in itertools.pairwise(order)
        if windows[follower].ids[: len(windows[i].ids)] == windows[i].ids
    }
    return [w for i, w in enumerate(windows) if i not in gone]


def _evenly(windows: Sequence[_Window], tokens: int | None) -> list[_Window]:
    """As many as fit into `tokens`, evenly over all."""
    n = len(windows)
    total = sum(len(w.ids) for w in windows)
    if tokens is None or total <= tokens:
        return list(windows)
    for count in range(min(n, max(1, round(n * tokens / total))), 0, -1):
        chosen = [windows[(2 * i + 1) * n // (2 * count)] for i in range(count)]
        if sum(len(w.ids) for w in chosen) <= tokens:
            return chosen
    return []


def beside(day: DayText, others: Sequence[tuple[Text, Sequence[Document]]]) -> tuple[Text, list[Document]]:
    """The day's text and its documents, with other texts behind it that are not to suffer."""
    text, documents = day.text, list(day.documents)
    for more, its_documents in others:
        text, documents = text.and_then(more, len(documents)), [*documents, *its_documents]
    return text, documents


def domains_beside(zchain: Path | None) -> tuple[str, ...]:
    """Domains whose text should stand beside requests: general text, and what the sidecar under them was solved for,
    as far as its manifest says so and the domain is at hand. Without that a refit takes back what the sidecar gives.
    """
    names = [GENERAL]
    if zchain is not None:
        with contextlib.suppress(OSError, ValueError):
            told = json.loads((zchain / MANIFEST).read_bytes())
            own = told.get("domain") if isinstance(told, dict) else None
            if own in embedded.domains() and own not in names:
                names.append(str(own))
    return tuple(names)


def domain_text(
    domain: Domain, tokenizer: Tokenizer, bos: int, *, length: int, tokens: int
) -> tuple[Text, list[Document]]:
    """About `tokens` tokens of a domain's fit slice, in windows, and its documents, for `beside`.

    Raises:
        UsageError: as `Text.cut`.
    """
    documents = list(domain.documents(SLICE))
    return Text.cut([d.text for d in documents], tokenizer.encode, bos, length=length, tokens=tokens), documents
