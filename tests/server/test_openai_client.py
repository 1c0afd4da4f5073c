"""The official client against the server: models, chat and completions, streamed and not, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ds4.engine.sampling import Penalties
from ds4.model import tokenizer as names
from tests.server.standin import BOS, TOKENIZER, Served, StandIn, StandInConfig, ids_of, serve

TEXT = "H\u00e9llo \U0001f468\u200d\U0001f469\u200d\U0001f467 \U00020000e\u0301 \ufffd!"
QUESTION: Any = [{"role": "user", "content": "Ping?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(StandIn(ids_of(TEXT), config=StandInConfig(200))) as served:
        yield served


def test_models(server: Served) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["stand-in"]
    assert client.models.retrieve("stand-in").owned_by == "ds4"
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("other")
    assert e.value.code == "model_not_found"


def test_chat(server: Served) -> None:
    answer = server.client().chat.completions.create(model="any", messages=QUESTION, temperature=0)
    choice = answer.choices[0]
    assert choice.message.content == TEXT and choice.message.role == "assistant" and choice.finish_reason == "stop"
    prompt = ids_of("<｜begin▁of▁sentence｜><｜User｜>Ping?<｜Assistant｜></think>")
    assert server.engine.prompts[-1] == prompt
    assert answer.usage is not None
    n = len(ids_of(TEXT))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), n)
    assert answer.usage.total_tokens == len(prompt) + n
    assert answer.usage.decode == {"rounds": n + 1}  # what the session reports; the end of sentence was drawn too
    assert answer.model == "stand-in" and answer.object == "chat.completion"


@pytest.mark.parametrize("usage", [True, False])
def test_chat_streamed(server: Served, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    stream = server.client().chat.completions.create(
        model="any",
        messages=QUESTION,
        stream=True,
        **options,
    )
    chunks = list(stream)
    assert len({c.id for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c.choices[0].delta.content for c in chunks if c.choices]
    assert "".join(d or "" for d in deltas) == TEXT
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [usage]
    if usage:
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(ids_of(TEXT))


def test_completions(server: Served) -> None:
    client = server.client()
    answer = client.completions.create(model="any", prompt="Once <｜User｜>", max_tokens=100)
    assert answer.choices[0].text == TEXT and answer.choices[0].finish_reason == "stop"
    assert server.engine.prompts[-1] == [BOS, *server.engine.tokenizer.encode("Once <｜User｜>")]
    ids = client.completions.create(model="any", prompt=[7, 8, 9])
    assert server.engine.prompts[-1] == [7, 8, 9]
    assert ids.choices[0].finish_reason == "length" and ids.usage is not None
    assert ids.usage.completion_tokens == 16  # the API's default
    chunks = list(client.completions.create(model="any", prompt=["x"], max_tokens=100, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_cut(server: Served, stream: bool) -> None:
    """Across tokens and in the middle of a cluster of characters; never a part of the stop string is sent."""
    stop = ["\U0001f469\u200d\U0001f467 \U00020000", "no such"]
    answer = server.client().chat.completions.create(
        model="any",
        messages=QUESTION,
        stop=stop,
        stream=stream,
    )
    if stream:
        chunks = list(answer)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text == TEXT[: TEXT.index(stop[0])] and reason == "stop"


@pytest.mark.parametrize("name", [names.USER, names.ASSISTANT, names.SYSTEM, names.BOS])
def test_a_chat_answer_ends_where_another_turn_begins(name: str) -> None:
    """The token, not its spelling; a plain completion is text as the model writes it."""
    script = [*ids_of("Yes."), TOKENIZER.special_id(name), *ids_of("and more")]
    with serve(StandIn(script)) as server:
        answer = server.client().chat.completions.create(model="any", messages=QUESTION)
        assert answer.choices[0].message.content == "Yes." and answer.choices[0].finish_reason == "stop"
        plain = server.client().completions.create(model="any", prompt="x", max_tokens=100)
        assert plain.choices[0].text.startswith("Yes.") and plain.choices[0].text.endswith("and more")
    with serve(StandIn(TOKENIZER.encode(f"Yes.{name}and more"))) as server:
        answer = server.client().chat.completions.create(model="any", messages=QUESTION)
        assert answer.choices[0].message.content == f"Yes.{name}and more"


def test_max_tokens_ends_with_length(server: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = server.client().chat.completions.create(
            model="any",
            messages=QUESTION,
            extra_body={name: 5},
        )
        assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content == "H\u00e9ll"
        assert answer.usage is not None and answer.usage.completion_tokens == 5


def test_sampling_settings_arrive(server: Served) -> None:
    server.client().chat.completions.create(
        model="any",
        messages=QUESTION,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        extra_body={"top_k": 40, "min_p": 0.05},
    )
    s = server.engine.samplings[-1]
    assert (s.temperature, s.top_p, s.seed, s.top_k, s.min_p) == (0.5, 0.9, 7, 40, 0.05)
    server.client().chat.completions.create(model="any", messages=QUESTION)
    t = server.engine.samplings[-1]
    assert (t.temperature, t.top_p, t.top_k, t.min_p) == (1.0, 1.0, 0, 0.0)
    server.client().chat.completions.create(model="any", messages=QUESTION)
    assert server.engine.samplings[-1].seed != t.seed


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_penalties_arrive(server: Served, api: str) -> None:
    client = server.client()

    def ask(**settings: Any) -> Penalties:
        if api == "chat":
            client.chat.completions.create(model="any", messages=QUESTION, max_tokens=1, **settings)
        else:
            client.completions.create(model="any", prompt="Ping?", max_tokens=1, **settings)
        return server.engine.samplings[-1].penalties

    given = ask(
        presence_penalty=0.5, frequency_penalty=-0.25, logit_bias={"5": -100, "17": 2.5, "0": 0},
        extra_body={"repetition_penalty": 1.1},
    )  # fmt: skip
    assert given == Penalties(0.5, -0.25, 1.1, ((5, -100.0), (17, 2.5), (0, 0.0)))
    assert ask(logit_bias={"3": 0}).neutral
    assert ask().neutral and ask(presence_penalty=0, frequency_penalty=0, logit_bias={}).neutral


def test_errors_become_the_clients_exceptions(server: Served) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="any", messages=QUESTION, n=2)
    assert e.value.param == "n" and e.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="any", prompt="x" * 300)
    assert e.value.code == "context_length_exceeded" and e.value.param == "prompt"
    assert "200" in e.value.message and "301" in e.value.message
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="any", messages=QUESTION, stream=True, temperature=-1)
    assert e.value.param == "temperature"


def test_thinking() -> None:
    script = ids_of("I stop to think \u00e9</think>42 stop")
    with serve(StandIn(script)) as server:
        client = server.client()
        answer = client.chat.completions.create(
            model="any",
            messages=QUESTION,
            reasoning_effort="high",
            stop=["stop"],
        )
        message = answer.choices[0].message
        assert message.content == "42 " and message.reasoning_content == "I stop to think \u00e9"
        assert server.engine.prompts[-1][-1] == server.engine.tokenizer.special_id("<think>")
        details = answer.usage.completion_tokens_details
        assert details is not None and details.reasoning_tokens == script.index(ids_of("</think>")[0]) + 1
        chunks = list(
            client.chat.completions.create(
                model="any",
                messages=QUESTION,
                stream=True,
                extra_body={"thinking": {"type": "enabled"}},
            )
        )
        deltas = [c.choices[0].delta for c in chunks]
        assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "I stop to think \u00e9"
        assert "".join(d.content or "" for d in deltas) == "42 stop"
        think = server.engine.tokenizer.special_id("<think>")
        for kwargs, thinks in (
            ({"thinking": True}, True), ({"enable_thinking": True}, True), ({"reasoning_effort": 5}, True),
            ({"thinking": False, "enable_thinking": False}, False), ({"reasoning_effort": "none"}, False),
            ({}, False),
        ):  # fmt: skip
            client.chat.completions.create(
                model="any", messages=QUESTION, extra_body={"chat_template_kwargs": kwargs}
            )
            assert (server.engine.prompts[-1][-1] == think) == thinks
        off = client.chat.completions.create(model="any", messages=QUESTION, reasoning_effort="none")
        assert (
            off.choices[0].message.content == "I stop to think \u00e9</think>42 stop"
        )  # chat mode: no reasoning part
        assert not hasattr(off.choices[0].message, "reasoning_content")


def test_key() -> None:
    with serve(StandIn(ids_of("yes")), api_key="s3cret") as server:
        for key in ("wrong", "s3cre"):
            with pytest.raises(openai.AuthenticationError) as e:
                server.client(key).models.list()
            assert e.value.code == "invalid_api_key"
        assert server.client("s3cret").models.list().data[0].id == "stand-in"
        assert server.get("/v1/models").status_code == 401
        assert server.get("/nowhere").status_code == 401
        assert server.get("/health").status_code == 200
