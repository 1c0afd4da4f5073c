"""A coding agent's round trip over the embedded model: its prompts are read, its outputs are forced, its tools run.

What the model says is forced by a constraint that allows one token at a time, so the whole way is the real one:
prompt, prefill, masks, calls, results, the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4 import embedded
from ds4.engine import Engine
from ds4.errors import RequestError
from ds4.model.tokenizer import EOS, Tokenizer
from ds4.model.tools import render_calls
from ds4.server.request import Generation, ServedEngine
from ds4.server.shared_fields import Asked
from tests.conftest import opened
from tests.server.standin import StandIn, StandInConfig, serve
from tests.server.test_agent import AGENT, CLIENTS, run_agent

SECRET = "the secret word is marmalade"


class Forced:
    """A TokenConstraint, and what starts one: exactly these tokens."""

    def __init__(self, script: Sequence[int], vocab: int) -> None:
        self._script, self._vocab, self._at = list(script), vocab, 0

    def start(self) -> Forced:
        return Forced(self._script, self._vocab)

    def rows(self, ahead: Sequence[int]) -> NDArray[np.uint32]:
        rows = np.zeros((1 + len(ahead), -(-self._vocab // 32)), np.uint32)
        for i in range(len(rows)):
            token = self._token(self._at + i)
            rows[i, token // 32] = np.uint32(1 << token % 32)
        return rows

    def valid(self, ahead: Sequence[int]) -> int:
        same = [token == self._token(self._at + i) for i, token in enumerate(ahead)]
        return same.index(False) if False in same else len(same)

    def advance(self, token: int) -> None:
        if token != self._token(self._at):
            raise RequestError(f"token {token} is not the one that was forced")
        self._at += 1

    def rollback(self, count: int) -> None:
        self._at -= count

    def _token(self, i: int) -> int:
        return self._script[min(i, len(self._script) - 1)]


@pytest.fixture
def engine(base: Path) -> Engine:
    """A server closes the engine that it was given."""
    return Engine.open(base, engram_dir=embedded.checkpoint(), prefill="replay", device=opened("fast", "greedy"))


@pytest.mark.long
@pytest.mark.skipif(AGENT is None, reason="no opencode on the path: npm install opencode-ai")
@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_reads_a_file_and_answers(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    work, tokenizer = tmp_path / "work", engine.tokenizer
    work.mkdir()
    (work / "one.txt").write_text(SECRET)
    call = {"name": "read", "arguments": {"filePath": str(work / "one.txt")}}
    calls = tokenizer.encode_segments(["I look.\n\n", *render_calls([call])])
    prompts: list[str] = []

    def forced(asked: Asked, compiler: object, own: Tokenizer) -> Generation:
        prompt = own.decode(asked.generation.prompt_ids)
        prompts.append(prompt)
        said = own.encode("A title")
        if asked.generation.tools is not None:
            said = own.encode("It is marmalade.") if SECRET in prompt else calls
        script = [*said, own.special_id(EOS)]
        return replace(asked.generation, constraint=Forced(script, own.vocab_size))

    monkeypatch.setattr(Asked, "constrained", forced)
    load: Callable[[object], ServedEngine] = lambda progress: engine  # noqa: E731
    shown = StandIn(config=StandInConfig(engine.config.max_position_embeddings))
    with serve(shown, open_engine=load) as server:
        few: dict[str, Any] = {"*": False, "read": True}
        agent = {"build": {"prompt": "You read files.", "tools": few}}
        told = run_agent(server, tmp_path, client, "What is the secret word?", agent=agent, tools=few)
        asked = server.get("/metrics").text
    assert f'ds4_requests_total{{end="tool_calls",path="{CLIENTS[client]}"}} 1.0' in asked
    (done,) = [t["part"]["state"] for t in told if t["type"] == "tool_use"]
    assert (done["status"], done["input"]) == ("completed", call["arguments"])
    assert [t["part"]["text"] for t in told if t["type"] == "text"] == ["I look.", "It is marmalade."]
    last = prompts[-1]
    assert SECRET in last[last.rindex("<tool_result>") :] and tokenizer.decode(calls) in last
