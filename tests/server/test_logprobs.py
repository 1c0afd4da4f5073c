"""Log-probabilities: every token of the text once, none of what was cut off, in the shapes of the official client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.model.tokenizer import END_THINK, THINK
from ds4.server.logprobs import LEAST, chat_entries, completion_lists, shown
from ds4.server.outbox import LOGPROB_CHARS, Failed, Outbox
from ds4.server.stream import CONTENT, REASONING, Delta, TextStream, Told
from tests.server.standin import FIRST_BYTE, TOKENIZER, StandIn, StandInToken, ids_of, serve, tokenizer_of, told
from tests.server.test_stream import ALPHABET, STOPS, cut

QUESTION: Any = [{"role": "user", "content": "Ping?"}]
TEXT = "H\u00e9llo \U0001f600!"


def streamed(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[list[Delta], TextStream]:
    """Pieces as one token each, through the stream; the i-th has the log-probability -i."""
    known = list(dict.fromkeys(pieces))
    stream = TextStream(tokenizer_of(known), in_reasoning=False, stops=stops)
    deltas: list[Delta] = []
    for i, piece in enumerate(pieces):
        deltas += stream.push(FIRST_BYTE + known.index(piece), StandInToken(-float(i), ()))
        if stream.stopped:
            break
    return deltas + stream.finish(), stream


@settings(deadline=None)
@given(st.text(ALPHABET + "\u00e9b", max_size=24), STOPS, st.data())
def test_every_token_of_the_text_is_told_once_and_in_time(text: str, stops: list[str], data: st.DataObject) -> None:
    """However tokens cut characters and stop strings: those that begin before the cut, with the text that they begin
    in.
    """
    whole = text.encode()
    borders = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=12)))
    pieces = [whole[a:b] for a, b in zip([0, *borders], [*borders, len(whole)])]
    deltas, stream = streamed(pieces, stops)
    kept, stopped = cut(text, stops)
    assert "".join(d.text for d in deltas) == kept and stream.stopped == stopped
    # the character that the first byte of each piece belongs to
    starts = [len(whole[:a].decode(errors="ignore")) for a in [0, *borders]]
    wanted = [i for i, at in enumerate(starts) if at < len(kept) or (not stopped)]
    seen: list[int] = []
    sent = 0
    for delta in deltas:
        for t in delta.told:
            seen.append(round(-t.logprob))
            assert t.offset == starts[seen[-1]]
            assert sent <= t.offset < sent + len(delta.text) or (delta is deltas[-1] and t.offset == len(kept))
        sent += len(delta.text)
    assert seen == wanted


def test_tokens_of_a_stop_string() -> None:
    """One that begins before it is told, though cut; one that begins in it is not; nor what was held back for it."""
    deltas, _ = streamed([b"one", b" tw", b"o th", b"ree"], ["wo three"])
    assert [(d.text, [t.offset for t in d.told]) for d in deltas] == [("one", [0]), (" t", [3])]
    deltas, _ = streamed([b"a", b"b", b"c", b"x"], ["abcd"])  # held back for nothing
    assert [(d.text, [t.offset for t in d.told]) for d in deltas] == [("abcx", [0, 1, 2, 3])]
    assert streamed([b"stop"], ["stop"])[0] == []
    deltas, _ = streamed([b"a", b"b", b"c"], ["abcd", "c"])  # the end decides
    assert [(d.text, [t.offset for t in d.told]) for d in deltas] == [("ab", [0, 1])]


def test_tokens_without_text_and_broken_characters() -> None:
    face = "\U0001f600".encode()
    deltas, _ = streamed([b"a", b"", b"b", b""], [])
    assert [(d.text, [t.offset for t in d.told]) for d in deltas] == [("a", [0]), ("b", [1, 1]), ("", [2])]
    deltas, _ = streamed([b"a", b"", b"stop"], ["stop"])  # its place is after all that is said
    assert [(d.text, [t.offset for t in d.told]) for d in deltas] == [("a", [0])]
    deltas, _ = streamed([face[:2], b"stop"], ["stop"])  # the second begins after the character that stays broken
    assert [(d.text, [t.offset for t in d.told]) for d in deltas] == [("\ufffd", [0])]
    deltas, _ = streamed([face[:1], face[1:3]], [])
    assert [(d.text, [t.offset for t in d.told]) for d in deltas] == [("\ufffd", [0, 0])]


def test_reasoning_is_told_in_its_own_channel() -> None:
    stream = TextStream(TOKENIZER, in_reasoning=True, stops=["e"])
    deltas: list[Delta] = []
    for i in ids_of("he</think>hi"):
        deltas += stream.push(i, StandInToken(-1.0, ()))
    got = [(d.channel, d.text, [(t.token, t.offset) for t in d.told]) for d in deltas + stream.finish()]
    h, e, i = (ids_of(c)[0] for c in "hei")
    assert got == [(REASONING, "h", [(h, 0)]), (REASONING, "e", [(e, 1)]),
                   (CONTENT, "h", [(h, 0)]), (CONTENT, "i", [(i, 1)])]  # fmt: skip


@pytest.mark.parametrize("ended", [True, False])
def test_reasoning_that_ends_in_a_token_without_text(ended: bool) -> None:
    """By `</think>`, or with the answer."""
    tokens = tokenizer_of([b"a", b""])
    stream = TextStream(tokens, in_reasoning=True, stops=[])
    ids = [FIRST_BYTE, FIRST_BYTE + 1, *([tokens.special_id(END_THINK), FIRST_BYTE] if ended else [])]
    deltas = [d for i in ids for d in stream.push(i, StandInToken(-1.0, ()))] + stream.finish()
    got = [(d.channel, d.text, [t.offset for t in d.told]) for d in deltas]
    assert got == [(REASONING, "a", [0]), (REASONING, "", [1]), *([(CONTENT, "a", [0])] if ended else [])]


def test_a_token_is_shown_as_text_or_as_bytes() -> None:
    t = tokenizer_of([b" caf\xc3\xa9", b" \xf0\x9f", b"\x98", b""])
    assert [shown(FIRST_BYTE + i, t) for i in range(4)] == [" caf\u00e9", " \\xf0\\x9f", "\\x98", ""]
    assert [shown(FIRST_BYTE + i, t, "bytes:") for i in range(4)] == [
        " caf\u00e9", "bytes: \\xf0\\x9f", "bytes:\\x98", "",
    ]  # fmt: skip
    thinks = t.special_id(THINK)
    entries = chat_entries([Told(thinks, 0, -1.0, ((FIRST_BYTE + 3, -2.0),))], t)
    assert entries == [{
        "token": THINK, "logprob": -1.0, "bytes": list(THINK.encode()),
        "top_logprobs": [{"token": "", "logprob": -2.0, "bytes": None}],
    }]  # fmt: skip


def test_no_infinity_and_no_second_of_a_name() -> None:
    t = tokenizer_of([b"a", b"b", b"", b""])
    a, b, none, nothing = range(FIRST_BYTE, FIRST_BYTE + 4)
    lists = completion_lists([Told(b, 2, -math.inf, ((a, -0.5), (none, -1.0), (nothing, -math.inf)))], t, 10)
    assert lists == {
        "tokens": ["b"], "token_logprobs": [LEAST], "top_logprobs": [{"a": -0.5, "": -1.0, "b": LEAST}],
        "text_offset": [12],
    }  # fmt: skip


def entries_of(chunks: Sequence[Any]) -> list[Any]:
    return [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]


@pytest.mark.parametrize("top", [None, 0, 2, 20])
def test_chat(top: int | None) -> None:
    """Whole and streamed alike; bytes joined are the text; asked for by both fields."""
    asked: Any = {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
    with serve(StandIn(ids_of(TEXT))) as server:
        create = server.client().chat.completions.create
        choice = create(model="any", messages=QUESTION, **asked).choices[0]
        content = choice.logprobs.content
        assert [s.top for s in server.engine.samplings] == [top or 0] * len(server.engine.samplings)
        chunks = list(create(model="any", messages=QUESTION, stream=True, **asked))
    ids = ids_of(TEXT)
    assert bytes(b for e in content for b in e.bytes).decode() == choice.message.content == TEXT
    assert [e.logprob for e in content] == [-0.25 * (i + 1) for i in range(len(ids))]
    for i, e in enumerate(content):
        likely = told(i, ids[i], top or 0).top
        assert [(x.token, x.logprob) for x in e.top_logprobs] == [(shown(t, TOKENIZER), p) for t, p in likely]
    assert content[1].token == "\\xc3" and content[2].token == "\\xa9"
    assert choice.logprobs.refusal is None and not hasattr(choice.logprobs, "reasoning_content")
    assert entries_of(chunks) == content
    for chunk in chunks[1:-1]:  # in time: never before the text, and no later than it
        assert bytes(b for e in entries_of([chunk]) for b in e.bytes).decode() == chunk.choices[0].delta.content
    assert chunks[0].choices[0].logprobs is None and chunks[-1].choices[0].logprobs is None


@pytest.mark.parametrize("stream", [True, False])
def test_chat_with_a_stop_string(stream: bool) -> None:
    with serve(StandIn(ids_of(TEXT))) as server:
        answer = server.client().chat.completions.create(
            model="any", messages=QUESTION, logprobs=True, stop=["lo", "ll!"], stream=stream
        )
        content = entries_of(list(answer) if stream else [answer])
    assert bytes(b for e in content for b in e.bytes).decode() == "H\u00e9l"


def test_chat_with_reasoning() -> None:
    with serve(StandIn(ids_of("hm</think>42"))) as server:
        client = server.client()
        create = partial(
            client.chat.completions.create,
            model="any",
            messages=QUESTION,
            logprobs=True,
            reasoning_effort="high",
        )
        whole = create().choices[0].logprobs
        parts = [c.choices[0].logprobs for c in create(stream=True) if c.choices[0].logprobs]
    assert [e.token for e in whole.content] == ["4", "2"] and [e["token"] for e in whole.reasoning_content] == [
        "h",
        "m",
    ]
    assert [e.logprob for e in whole.content] == [-1.0, -1.25]  # `</think>` was the third
    assert [e for p in parts for e in p.content or ()] == whole.content
    assert [e for p in parts for e in p.reasoning_content or ()] == whole.reasoning_content


@pytest.mark.parametrize("prompt", ["Once \u00e9", [0, *TOKENIZER.encode("Once \u00e9")]])
def test_completions(prompt: Any) -> None:
    with serve(StandIn(ids_of(TEXT))) as server:
        create = server.client().completions.create
        answers = {n: create(model="any", prompt=prompt, max_tokens=99, logprobs=n).choices[0] for n in (0, 2, 20)}
        chunks = list(create(model="any", prompt=prompt, max_tokens=99, logprobs=2, stream=True))
        assert create(model="any", prompt=prompt).choices[0].logprobs is None
    ids, start = ids_of(TEXT), len("Once \u00e9")
    for n, choice in answers.items():
        lists = choice.logprobs
        assert lists.tokens[:4] == ["H", "bytes:\\xc3", "bytes:\\xa9", "l"]
        assert lists.text_offset[:5] == [start, start + 1, start + 1, start + 2, start + 3]
        assert lists.token_logprobs == [-0.25 * (i + 1) for i in range(len(ids))]
        assert [len(m) for m in lists.top_logprobs] == [max(n, 1)] * len(ids)
        assert all(m[t] == p for m, t, p in zip(lists.top_logprobs, lists.tokens, lists.token_logprobs))
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        parts = [x for c in chunks if c.choices[0].logprobs for x in getattr(c.choices[0].logprobs, name)]
        assert parts == getattr(answers[2].logprobs, name)


def test_what_cannot_come_is_told_as_a_number() -> None:
    never = StandInToken(-math.inf, ((5, -math.inf),))
    with serve(StandIn(ids_of("a"), told=lambda *_: never)) as server:
        entry = server.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == LEAST


def test_nothing_is_told_unless_asked_for() -> None:
    class Unread:
        @property
        def logprob(self) -> float:
            raise AssertionError("nobody asked")

    unread: Any = Unread()
    with serve(StandIn(ids_of("abc"), told=lambda *_: unread)) as server:
        choice = server.chat().json()["choices"][0]
        assert choice["logprobs"] is None and choice["message"]["content"] == "abc"


def test_an_answer_without_a_token_has_empty_lists() -> None:
    with serve(StandIn()) as server:
        assert server.chat(logprobs=True).json()["choices"][0]["logprobs"] == {"content": [], "refusal": None}
        choice = server.post("/v1/completions", {"prompt": "x", "logprobs": 2}).json()["choices"][0]
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def test_waiting_log_probabilities_count_against_a_slow_reader() -> None:
    """Joined while they wait; past the limit the request is over."""

    async def fill() -> None:
        outbox = Outbox(3 * (1 + 3 * LOGPROB_CHARS))
        said = Told(5, 0, -1.0, ((5, -1.0), (6, -2.0)))
        assert all(outbox.put(Delta(CONTENT, "a", (said,))) for _ in range(3))
        assert await outbox.take() == [Delta(CONTENT, "aaa", (said, said, said))]
        assert [outbox.put(Delta(CONTENT, "a", (said,))) for _ in range(4)] == [True, True, True, False]
        assert isinstance((await outbox.take())[-1], Failed)

    asyncio.run(fill())
