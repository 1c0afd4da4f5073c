"""The server over the real engine, on a fixture's base: the same tokens as a session of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds4.engine import Engine, Sampling
from ds4.engine.sampling import Penalties
from ds4.model.chat import render
from ds4.server.logprobs import completion_lists
from ds4.server.request import ServedEngine
from ds4.server.stream import Told
from ds4.server.warm import warm_up
from tests.base.toys import toy_base, toy_dir
from tests.conftest import opened
from tests.server.standin import Served, StandIn, events, serve, until


@pytest.fixture(scope="module")
def base() -> Path:
    return toy_base("oracle-a", bits=6)


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    return Engine.open(base, engram_dir=toy_dir("oracle-a"), prefill="replay", device=opened("fast", "greedy"))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Served]:
    def load(progress: object) -> ServedEngine:
        warm_up(engine)
        return engine

    with serve(StandIn(), open_engine=load) as served:
        yield served


def expected(engine: Engine, prompt: list[int], n: int, sampling: Sampling) -> tuple[list[int], str]:
    session = engine.session()
    session.sync(prompt)
    ids = [session.next(sampling) for _ in range(n)]
    if engine.config.eos_token_id in ids:
        ids = ids[: ids.index(engine.config.eos_token_id)]
    return ids, engine.tokenizer.decode(ids)


def test_the_engine_is_what_the_server_asks_for(engine: Engine) -> None:
    served: ServedEngine = engine  # for the type checker; the rest is below
    assert served.name == "oracle-a"


# The worker's thread and this one take turns with the device: expectations come before the server's answers.
@pytest.mark.parametrize("text", ["hello world", "the prompt of a request that is longer than one window " * 2])
def test_tokens_are_those_of_a_session(server: Served, engine: Engine, text: str) -> None:
    prompt = [engine.config.bos_token_id, *engine.tokenizer.encode(text)]
    greedy = expected(engine, prompt, 12, Sampling())
    drawn = expected(engine, prompt, 12, Sampling(0.8, 20, 0.95, 0.01, 7))
    body: dict[str, Any] = {"prompt": text, "max_tokens": 12, "temperature": 0}
    settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "seed": 7}
    for given, want in ((body, greedy), (body | settings, drawn)):
        answer = server.post("/v1/completions", given).json()
        assert answer["choices"][0]["text"] == want[1]
        assert answer["usage"]["completion_tokens"] == len(want[0])
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert {"rounds", "verified_drafts", "weight_bytes_per_token", "engram"} <= set(answer["usage"]["decode"])
        chunks = events(server.post("/v1/completions", given | {"stream": True}))
        assert "".join(c["choices"][0]["text"] for c in chunks) == want[1]


def test_chat_renders_the_prompt_and_cuts_at_a_stop_string(server: Served, engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi <｜System｜>"}]
    prompt = engine.tokenizer.encode_segments(render(messages, thinking=False), spell_missing=True)
    _, text = expected(engine, prompt, 16, Sampling())
    answer = server.chat(messages[0]["content"], max_tokens=16, temperature=0).json()
    assert answer["choices"][0]["message"]["content"] == text
    stop = text[5:7]
    cut = server.chat(messages[0]["content"], max_tokens=16, temperature=0, stop=stop).json()["choices"][0]
    assert cut["message"]["content"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"


def test_every_api_draws_the_same_tokens(server: Served, engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi <｜System｜>"}]
    prompt = engine.tokenizer.encode_segments(render(messages, thinking=False), spell_missing=True)
    ids, text = expected(engine, prompt, 12, Sampling())
    told = server.post("/v1/messages", {"messages": messages, "max_tokens": 12, "temperature": 0}).json()
    assert told["content"] == [{"type": "text", "text": text}]
    assert (told["usage"]["input_tokens"], told["usage"]["output_tokens"]) == (len(prompt), len(ids))
    body = {"input": messages[0]["content"], "max_output_tokens": 12, "temperature": 0}
    assert server.post("/v1/responses", body).json()["output"][0]["content"][0]["text"] == text
    assert server.post("/apply-template", {"messages": messages, "tokens": True}).json()["tokens"] == prompt


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_penalties_and_log_probabilities_are_those_of_a_session(
    server: Served, engine: Engine, temperature: float
) -> None:
    """Streamed or not; the model's own, whatever the penalties made of them."""
    prompt = [engine.config.bos_token_id, *engine.tokenizer.encode("to be or not to be")]
    penalties = Penalties(0.7, 1.1, 1.3, ((77, 4.0), (engine.config.eos_token_id, -100.0)))
    session = engine.session()
    session.sync(prompt)
    told = []
    for _ in range(12):
        token = session.next(Sampling(temperature, seed=11, penalties=penalties, top=4))
        told.append(Told(token, 0, session.last.logprob, session.last.top))
    bias = {str(token): value for token, value in penalties.logit_bias}
    body = {
        "prompt": prompt, "max_tokens": 12, "temperature": temperature, "seed": 11, "presence_penalty": 0.7,
        "frequency_penalty": 1.1, "repetition_penalty": 1.3, "logit_bias": bias, "logprobs": 4,
    }  # fmt: skip
    choice = server.post("/v1/completions", body).json()["choices"][0]
    want = completion_lists(told, engine.tokenizer, 0)
    names = ("tokens", "token_logprobs", "top_logprobs")
    assert {n: choice["logprobs"][n] for n in names} == {n: want[n] for n in names}
    assert choice["text"] == engine.tokenizer.decode([t.token for t in told])
    plain = server.post("/v1/completions", body | {"logprobs": None}).json()["choices"][0]
    assert plain["text"] == choice["text"] and plain["logprobs"] is None
    pieces = [c["choices"][0]["logprobs"] for c in events(server.post("/v1/completions", body | {"stream": True}))]
    assert {n: [x for p in pieces if p for x in p[n]] for n in names} == {n: want[n] for n in names}


def test_answers_do_not_depend_on_what_came_before(server: Served) -> None:
    """At once, after each other, after one that left in the middle."""
    bodies = [{"prompt": f"prompt {i} of several", "max_tokens": 8, "temperature": 0} for i in range(4)]

    def ask(body: dict[str, Any]) -> str:
        return str(server.post("/v1/completions", body).json()["choices"][0]["text"])

    alone = [ask(b) for b in bodies]
    sock = server.raw("/v1/completions", {"prompt": "x", "max_tokens": 200, "stream": True})
    assert sock.recv(1)
    sock.close()
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(ask, bodies)) == alone
    until(lambda: server.worker.running == 0)


def test_the_context_is_filled_and_not_overrun(server: Served, engine: Engine) -> None:
    context = engine.config.max_position_embeddings
    answer = server.post("/v1/completions", {"prompt": [5] * (context - 3), "max_tokens": 9, "temperature": 0}).json()
    assert answer["usage"]["completion_tokens"] <= 3
    if answer["usage"]["completion_tokens"] == 3:
        assert answer["choices"][0]["finish_reason"] == "length"
    refused = server.post("/v1/completions", {"prompt": [5] * context})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
