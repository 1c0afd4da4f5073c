"""Other sidecars on a running server, and its device lent, over the real engine: no answer has anything of both."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ds4.base.reader import Base
from ds4.cli import serve as program
from ds4.device.context import Context
from ds4.device.memory import Allocation
from ds4.engine import Engine, Sampling
from ds4.engine.session import Session
from ds4.engine.weights import placed_bytes
from ds4.errors import CapacityError, DeviceError
from ds4.model.config import ModelConfig
from ds4.posttrain.admin_key import read_key
from ds4.posttrain.log import read_log
from ds4.server.outbox import Event, Failed, Outbox
from ds4.server.request import Progress, ServedEngine
from ds4.server.requests_log import RequestLog
from ds4.server.warm import warm_up
from ds4.sidecar.files import gain_path
from tests.base.toys import toy_base, toy_dir
from tests.conftest import opened
from tests.reference_sidecar import sign, write_sidecar
from tests.server.standin import Served, StandIn, events, ids_of, serve, until
from tests.server.test_life import Gate
from tests.server.test_real_engine import expected
from tests.server.test_serve import launch

NAME = "oracle-a"
BODY: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 24, "temperature": 0}
BROKEN = {"cut": "gr_L00.bin", "of another sidecar": "base.fnv", "gone": "current"}


@dataclass(frozen=True)
class Nights:
    """A folder of nights over a sidecar; `texts`: what each answers to BODY, None: the sidecar alone."""

    zchain: Path
    home: Path
    texts: dict[str | None, str]

    def mount(self, name: str | None) -> None:
        if name is None:
            (self.home / "current").unlink(missing_ok=True)
            return
        beside = self.home / ".current.new"
        beside.symlink_to(f"nights/{name}")
        os.replace(beside, self.home / "current")

    @property
    def flags(self) -> list[str]:
        where = ["-m", str(toy_base(NAME, bits=6)), "--engram-dir", str(toy_dir(NAME))]
        return [*where, "--zchain", str(self.zchain), "--posttrain", str(self.home)]


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    """Two good ones that answer differently, and each kind of broken one."""
    config = ModelConfig.load(toy_dir(NAME))
    where = tmp_path_factory.mktemp("nights")
    zchain, home = where / "law", where / "nightly"
    write_sidecar(zchain, config, 1)
    write_sidecar(where / "other", config, 9)
    (home / "nights").mkdir(parents=True)
    (home / "nightly.json").write_text('{"kind": "ds4-nightly", "version": 1}')
    for seed, name in enumerate(("a", "b", "cut", "of another sidecar"), 2):
        night = home / "nights" / name
        write_sidecar(night, config, seed, biases=False)
        sign(night, where / "other" if name == "of another sidecar" else zchain, config)
    cut = gain_path(home / "nights" / "cut", 0)
    cut.write_bytes(cut.read_bytes()[:-1])
    engine = Engine.open(
        toy_base(NAME, bits=6), engram_dir=toy_dir(NAME), prefill="replay", device=opened("fast", "greedy")
    )  # fmt: skip
    prompt = [config.bos_token_id, *engine.tokenizer.encode(BODY["prompt"])]
    texts: dict[str | None, str] = {}
    for good in (None, "a", "b"):
        engine.remount(zchain, None if good is None else home / "nights" / good)
        texts[good] = expected(engine, prompt, BODY["max_tokens"], Sampling())[1]
    engine.close()
    assert len(set(texts.values())) == 3
    return Nights(zchain, home, texts)


@contextmanager
def serving(nights: Nights, current: str | None, **kw: Any) -> Iterator[Served]:
    """What `ds4-server` does, in this process."""
    nights.mount(current)
    model = program.Model(program.parse(nights.flags))
    with serve(StandIn(), open_engine=model.open, remount=model.remount, settle=model.settle, **kw) as server:
        yield server


def ask(server: Served) -> str:
    return str(server.post("/v1/completions", BODY).json()["choices"][0]["text"])


def mounted(server: Served) -> str | None:
    """The night that /health and /v1/models agree on."""
    told = [server.get("/health").json()["sidecars"], server.get("/v1/models").json()["data"][0]["sidecars"]]
    assert told[0] == told[1] and told[0]["zchain"]["name"] == "law"
    return None if told[0]["posttrain"] is None else str(told[0]["posttrain"]["name"])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds the device at the tenth token from when `at` is set to 9."""
    made, drawn, draw = Gate(-2), 0, Session.next

    def gated(self: Session, *args: Any, **kw: Any) -> int:
        nonlocal drawn
        drawn = drawn + 1 if made.at >= 0 else 0
        made(drawn - 1)
        return draw(self, *args, **kw)

    monkeypatch.setattr(Session, "next", gated)
    yield made
    made.open.set()


def test_a_stream_ends_as_it_began_and_the_next_request_has_the_new_night(
    nights: Nights, gate: Gate, tmp_path: Path
) -> None:
    """The switch and the order come in the middle of an answer, and a request that waits behind it was there before
    them. The log says of each what answered it."""
    log = RequestLog(tmp_path / "log", 30)
    with serving(nights, "a", requests=log) as server, ThreadPoolExecutor() as pool:
        whole = server.post("/v1/completions", BODY).json()["choices"][0]
        gate.at = 9
        stream = pool.submit(server.post, "/v1/completions", BODY | {"stream": True})
        assert gate.reached.wait(30)
        waits = pool.submit(ask, server)
        until(lambda: server.worker.waiting == 1)
        nights.mount("b")
        order = pool.submit(server.admin, "reload")
        until(lambda: server.worker._reloads)
        assert mounted(server) == "a"
        gate.open.set()
        streamed = events(stream.result())
        assert "".join(c["choices"][0]["text"] for c in streamed) == whole["text"] == nights.texts["a"]
        assert streamed[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
        assert order.result().status_code == 200
        assert order.result().json()["sidecars"]["posttrain"]["name"] == mounted(server) == "b"
        assert waits.result() == ask(server) == nights.texts["b"]
        until(lambda: server.get("/health").json()["request_log"]["written"] == 4)
    rows = [x.row["sidecars"]["posttrain"]["name"] for x in read_log(tmp_path / "log").values()]
    assert rows == ["a", "a", "b", "b"]


def test_from_no_night_to_one_and_back(nights: Nights) -> None:
    with serving(nights, None) as server:
        for name in ("b", None):
            nights.mount(name)
            assert server.admin("reload").status_code == 200
            assert mounted(server) == name and ask(server) == nights.texts[name]


def test_what_cannot_be_mounted_changes_nothing(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken file, one for another sidecar, a night that is not there, a model that then does not answer."""
    with serving(nights, "a") as server:
        for name, names in BROKEN.items():
            nights.mount(name)
            refused = server.admin("reload")
            error = refused.json()["error"]
            assert refused.status_code == 500 and error["code"] == "reload_failed"
            assert names in error["message"] and "what was mounted stays" in error["message"]
            assert mounted(server) == "a" and ask(server) == nights.texts["a"]
        nights.mount("b")

        def out_of_memory(engine: Any) -> None:
            warm_up(engine)
            raise CapacityError("no 77 bytes of device memory")

        monkeypatch.setattr(program, "warm_up", out_of_memory)
        assert "77 bytes" in server.admin("reload").json()["error"]["message"]
        assert mounted(server) == "a" and ask(server) == nights.texts["a"]
        monkeypatch.undo()
        assert server.admin("reload").status_code == 200
        assert mounted(server) == "b" and ask(server) == nights.texts["b"]


def test_a_reload_while_lent_is_seen_to_at_the_return(nights: Nights) -> None:
    """And a night that cannot be mounted then does not keep the server from coming back with the one before."""
    with serving(nights, "a") as server, ThreadPoolExecutor() as pool:
        for name, want in (("b", "b"), ("cut", "b"), (None, None)):
            lease = server.admin("lend", {"for": "a test"}).json()["lease"]
            waits = pool.submit(ask, server)
            until(lambda: server.worker.waiting == 1)
            nights.mount(name)
            order = server.admin("reload")
            assert order.status_code == 202 and order.json()["status"] == "lent"
            server.admin(f"lend/{lease}/return")
            assert waits.result() == nights.texts[want] and mounted(server) == want


def test_a_reload_asked_for_while_the_model_loads_is_remembered() -> None:
    go = threading.Event()
    reloads: list[ServedEngine] = []

    def slow(progress: Progress) -> StandIn:
        assert go.wait(30)
        return StandIn(ids_of("x"))

    with (
        serve(StandIn(), open_engine=slow, remount=reloads.append, wait=False) as server,
        ThreadPoolExecutor() as pool,
    ):
        order = pool.submit(server.admin, "reload")
        until(lambda: server.worker._reloads)
        assert not reloads
        go.set()
        assert order.result().status_code == 200 and reloads == [server.worker.engine]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Address -> bytes of what was allocated on the device since, and not given back to the driver."""
    live: dict[int, int] = {}
    allocate, call = Context.allocate, Context.call

    def counted(self: Context, nbytes: int) -> Allocation:
        made = allocate(self, nbytes)
        live[made.ptr] = nbytes
        return made

    def watched(self: Context, name: str, *args: Any) -> Any:
        if name == "cuMemFree":
            live.pop(args[0], None)
        return call(self, name, *args)

    monkeypatch.setattr(Context, "allocate", counted)
    monkeypatch.setattr(Context, "call", watched)
    return live


def test_a_lent_device_is_empty(nights: Nights, memory: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, sidecars, drafts, states, graphs, scratch: nothing is left, whatever became of the requests before:
    one was answered, one left, one failed in the middle. What is opened again answers as before."""
    draw, put = Session.next, Outbox.put
    told: list[Event] = []  # by nobody yet: a slow reader's outbox holds what its request failed with

    def noted(self: Outbox, event: Event) -> bool:
        told.append(event)
        return put(self, event)

    monkeypatch.setattr(Outbox, "put", noted)

    def fails(self: Session, *args: Any, **kw: Any) -> int:
        if len(self.tokens) > 12:
            try:
                raise ValueError("for a reason")
            except ValueError as e:
                raise DeviceError("a token failed") from e
        return draw(self, *args, **kw)

    weights = placed_bytes(Base.open(toy_base(NAME, bits=6), toy_dir(NAME)))
    with serving(nights, "a") as server:
        assert ask(server) == nights.texts["a"]
        for _ in range(2):
            sock = server.raw("/v1/completions", {"prompt": "x", "max_tokens": 400, "stream": True})
            assert sock.recv(1)
            sock.close()
            with monkeypatch.context() as patched:
                patched.setattr(Session, "next", fails)
                assert server.post("/v1/completions", BODY).status_code == 500
            assert sum(memory.values()) > weights
            lease = server.admin("lend", {"for": "a test"}).json()["lease"]
            assert memory == {} and any(isinstance(event, Failed) for event in told)
            server.admin(f"lend/{lease}/return")
            assert ask(server) == nights.texts["a"]


def test_the_whole_program(nights: Nights, tmp_path: Path) -> None:
    """SIGHUP while it loads and after it, a broken night, a borrower that is killed, SIGTERM while it is lent."""
    nights.mount("a")
    key_file = tmp_path / "admin.key"
    process = launch(tmp_path, *nights.flags, "--admin-key", str(key_file))
    said: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
    borrower = None

    def count(text: str) -> int:
        return sum(text in line for line in list(said))

    try:
        first = process.stderr.readline()
        match = re.search(r"listening on (http://127\.0\.0\.1:\d+)", first)
        assert match, first
        url = match[1]
        process.send_signal(signal.SIGHUP)
        reader.start()
        until(lambda: count("reloaded"), 120)
        assert count("is loaded") == 1  # it was remembered

        def answer() -> str:
            return str(httpx.post(url + "/v1/completions", json=BODY, timeout=120).json()["choices"][0]["text"])

        assert answer() == nights.texts["a"]
        nights.mount("b")
        process.send_signal(signal.SIGHUP)
        until(lambda: count("reloaded") == 2, 60)
        assert answer() == nights.texts["b"]
        nights.mount("cut")
        process.send_signal(signal.SIGHUP)
        until(lambda: count("what was mounted stays"), 60)
        assert answer() == nights.texts["b"]

        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        borrows = (
            "import sys, time; from ds4.posttrain.borrow import Server\n"
            "with Server(*sys.argv[1:]).borrow(lease_s=1, purpose='a child'):\n"
            "    print('lent', flush=True); time.sleep(99)"
        )
        borrower = subprocess.Popen(
            [sys.executable, "-c", borrows, url, str(key_file)], stdout=subprocess.PIPE, text=True
        )
        assert borrower.stdout is not None and borrower.stdout.readline() == "lent\n"
        assert httpx.get(url + "/health", timeout=30).json()["lent"]["for"] == "a child"
        borrower.kill()
        assert answer() == nights.texts["b"]  # the server noticed; the broken night did not keep it from coming back
        assert count("a child let its lease run out") == 1

        headers = {"Authorization": f"Bearer {read_key(key_file)}"}
        assert httpx.post(url + "/admin/lend", json={"for": "x"}, headers=headers, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        reader.join(10)
        assert said[-1].endswith("stopped\n") and read_key(key_file) not in first + "".join(said)
    finally:
        process.kill()
        if borrower is not None:
            borrower.kill()
