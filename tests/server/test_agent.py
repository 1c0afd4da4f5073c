"""A coding agent over this server: it declares its tools, runs the calls of a scripted answer, sends results back.

Needs the agent `opencode` on the path (`npm install opencode-ai`; 1.18.33 was tried); without it this is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ds4.engine import Sampling
from ds4.model.tokenizer import DSML
from tests.server.standin import EOS, TOKENIZER, Served, StandIn, StandInConfig, StandInSession, ids_of, serve
from tests.server.test_tools import script_of

AGENT = shutil.which("opencode")
CLIENTS = {
    "@ai-sdk/openai-compatible": "/v1/chat/completions", "@ai-sdk/anthropic": "/v1/messages",
    "@ai-sdk/openai": "/v1/responses",
}  # fmt: skip
SECRET = "the secret word is marmalade"


@dataclass
class Scripted(StandIn):
    """An engine whose answer depends on the prompt."""

    script_for: Callable[[str], Sequence[int]] = lambda prompt: ()

    def session(self) -> StandInSession:
        return ScriptedSession(self)


class ScriptedSession(StandInSession):
    def next(self, sampling: Sampling, *, left: int | None = None) -> int:
        engine = self.engine
        assert isinstance(engine, Scripted)
        self.drawn += 1
        return [*engine.script_for(TOKENIZER.decode(engine.prompts[-1])), EOS][self.drawn - 1]


def run_agent(server: Served, folder: Path, client: str, ask: str, **settings: Any) -> list[Any]:
    """What the agent tells of one question, asked in `folder`/work by the client library `client`.

    `settings`: of its configuration, beside those that make this server its only provider.
    """
    model = {"name": "m", "limit": {"context": server.engine.config.max_position_embeddings, "output": 512}}
    provider = {
        "npm": client, "name": "ds4", "models": {"m": model},
        "options": {"baseURL": server.url + "/v1", "apiKey": "none"},
    }  # fmt: skip
    settings |= {
        "autoupdate": False, "share": "disabled", "provider": {"ds4": provider}, "enabled_providers": ["ds4"],
        "model": "ds4/m", "small_model": "ds4/m",
    }  # fmt: skip
    (folder / "agent.json").write_text(json.dumps(settings))
    (folder / "home").mkdir()
    env = {
        "PATH": os.environ["PATH"], "HOME": str(folder / "home"), "OPENCODE_CONFIG": str(folder / "agent.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }  # fmt: skip
    ran = subprocess.run(
        [str(AGENT), "run", "--model", "ds4/m", "--format", "json", ask], cwd=folder / "work", env=env,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
@pytest.mark.skipif(AGENT is None, reason="no opencode on the path: npm install opencode-ai")
@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_reads_two_files_and_answers(tmp_path: Path, client: str) -> None:
    """Two calls in one answer; their results come back, in order, as results, whichever API it speaks."""
    work = tmp_path / "work"
    work.mkdir()
    files = [work / "one.txt", work / "two.txt"]
    files[0].write_text(SECRET)
    files[1].write_text("nothing \u00e9\U0001f600 here")
    calls = script_of([("read", {"filePath": str(f)}) for f in files], "I look.")

    def script_for(prompt: str) -> Sequence[int]:
        if "### Available Tool Schemas" not in prompt:
            return ids_of("A title")
        return ids_of("It is marmalade.") if SECRET in prompt else calls

    engine = Scripted(config=StandInConfig(1 << 20), script_for=script_for)
    with serve(engine) as server:
        told = run_agent(server, tmp_path, client, "What is the secret word?")
        asked = server.get("/metrics").text
    assert f'ds4_requests_total{{end="tool_calls",path="{CLIENTS[client]}"}} 1.0' in asked
    done = [t["part"]["state"] for t in told if t["type"] == "tool_use"]
    assert sorted(s["input"]["filePath"] for s in done) == [str(f) for f in files]
    assert all(s["status"] == "completed" for s in done)
    assert [t["part"]["text"] for t in told if t["type"] == "text"] == ["I look.", "It is marmalade."]
    last = TOKENIZER.decode(engine.prompts[-1])
    assert last.count(f"<{DSML} invoke name=") - last.count('<\uff5cDSML\uff5c invoke name="$') == 2
    results = last[last.rindex("</\uff5cDSML\uff5c calls>") :]
    assert results.count("<tool_result>") == 2 and results.index(SECRET) < results.index("\u00e9\U0001f600")
