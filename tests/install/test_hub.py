"""install.sh --hub: from a hub on this machine to a base that is served, with the sidecars that came along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.cli import install
from ds4.cli.domain import Choice
from ds4.cli.home import Home
from ds4.cli.install_hub import HubModel, choose_domain
from ds4.errors import CapacityError, Ds4Error, UsageError
from ds4.hub.plan import published
from tests.base.toys import toy_base
from tests.hub.server import DEVELOPERS, HubServer, hub_server, status
from tests.install.test_domain import make
from tests.install.test_install import CHECKPOINT, free_port, run, words

REPO = "someone/toy"
PIECE = 100_000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A toy's base in pieces and two sidecars; its checkpoint, which has the n-gram tables, in the official place."""
    with hub_server() as server:
        (tmp_path / "published").mkdir()
        data = toy_base("oracle-a", bits=6).read_bytes()
        n = -(-len(data) // PIECE)
        files = {f"toy.gguf.part{i + 1}of{n}": data[i * PIECE : (i + 1) * PIECE] for i in range(n)}
        for name, seed in (("law", 1), ("poetry", 2)):
            folder = make(tmp_path / "published" / name, seed)
            files |= {f"sidecars/{name}/{p.name}": p.read_bytes() for p in folder.iterdir()}
        server.publish(REPO, files)
        server.publish(published()[1].name, {"model.safetensors": (CHECKPOINT / "model.safetensors").read_bytes()})
        yield server


def flags(hub: HubServer, *more: str) -> list[str]:
    return ["--venv", sys.prefix, "--hub", REPO, "--endpoint", hub.url, "--no-start", *more]


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEVELOPERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nonexistent/token")


def test_from_a_repository_to_settings(hub: HubServer, tmp_path: Path) -> None:
    """Ended in the middle of the base first; the second run goes on there, and a third asks nobody."""
    home = Home(tmp_path / "d")
    names = [f"toy.gguf.part{i}of" for i in (1, 2)]
    hub.always = lambda request, data, first, last: (
        names[1] in request.path and status(404)(request, data, first, last)
    )
    done = run(home.root, *flags(hub))
    assert done.returncode == 1 and "run the same command to go on" in done.stderr, done.stderr
    assert not home.toml.exists()
    hub.always = None
    first = len(hub.asked)
    done = run(home.root, *flags(hub, "--domain", "poetry"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fetching someone/toy" in done.stdout and "with the sidecar of domain poetry" in done.stdout
    asked = [name for name, _ in hub.asked[first:]]
    assert names[1] in asked[0] and not any(names[0] in name for name in asked)
    folder = home.models / "hub-someone--toy"
    assert (folder / "toy.gguf").read_bytes() == toy_base("oracle-a", bits=6).read_bytes()
    settings = home.settings()
    assert settings["model"] == str(folder / "toy.gguf") and "engram_dir" not in settings
    assert settings["zchain"] == str(folder / "sidecars" / "poetry")
    hub.close()
    again = run(home.root, *flags(hub))
    assert again.returncode == 0 and f"{folder / 'toy.gguf'} is there" in again.stdout, again.stderr
    assert "domain poetry, as before" in again.stdout


def test_no_repository_is_swept(tmp_path: Path) -> None:
    """Whatever its name looks like."""
    home = Home(tmp_path)
    home.make()
    folder = HubModel(home, install.parse(["--hub", "a/b.part-1"])).folder
    folder.mkdir()
    home.sweep()
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("more", "shards"),
    [([], []), (["--shards", "a/b"], ["--shards", "a/b"]), (["--engram-dir", "."], ["--shards", "none"])],
)
def test_what_fetch_is_asked(tmp_path: Path, more: list[str], shards: list[str]) -> None:
    """Shards of one's own are not fetched."""
    args = install.parse(["--hub", f"{REPO}@v1", "--endpoint", "http://localhost", "--no-xet", *more])
    asked = HubModel(Home(tmp_path), args)._words
    where = str(tmp_path / "models" / "hub-someone--toy")
    assert asked[asked.index("fetch") :] == [
        "fetch", f"{REPO}@v1", "--to", where, *shards, "--endpoint", "http://localhost", "--no-xet"
    ]  # fmt: skip


def test_what_does_not_fit_is_said_before_it_comes(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ds4.cli.machine.available_memory", lambda: 10**5)
    args = ["--dir", str(tmp_path / "d"), "--hub", REPO, "--endpoint", hub.url]
    made = install.Install(install.parse([*args, "--venv", sys.prefix]))
    made.home.make()
    made.home.link_venv(Path(sys.prefix))
    with pytest.raises(Ds4Error, match=r"the model toy.gguf takes"):
        made._model()
    made = install.Install(install.parse([*args, "--no-start"]))
    plan = HubModel._run

    def no_room(self: HubModel, more: list[str], capture: bool) -> str:
        return json.dumps(json.loads(plan(self, more, capture)) | {"no_room": "/: 1 GB are free"})

    with monkeypatch.context() as m:
        m.setattr(HubModel, "_run", no_room)
        with pytest.raises(CapacityError, match="1 GB are free"):
            made._model()
    assert hub.asked == []
    hub.gated.add(REPO)
    with pytest.raises(Ds4Error, match="the repository cannot be used; the lines above say why"):
        made._model()
    assert "environment variable HF_TOKEN" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--hub", "toy"], "--hub toy: expected OWNER/REPO"),
        (["--hub", ""], "--hub is empty"),
        (["--hub", REPO, "--model", str(CHECKPOINT)], "--hub and --model both say"),
        (["--hub", REPO, "--shards", "x"], "--shards x: expected OWNER/REPO"),
        (["--hub", REPO, "--shards", "a/b", "--engram-dir", "."], "--shards and --engram-dir both say"),
        (["--shards", "a/b"], "--shards belongs to --hub OWNER/REPO"),
        (["--no-xet"], "--no-xet belongs to --hub OWNER/REPO"),
        (["start", "--hub", REPO], "--hub belongs to the installation"),
        (["stop", "--no-xet"], "--no-xet belongs to the installation"),
    ],
)
def test_usage(tmp_path: Path, given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        install.run([*given, "--dir", str(tmp_path / "d")])
    assert not (tmp_path / "d").exists()


def test_a_domain_that_came_with_the_model_comes_first(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (home.models / "hub-a--b" / "sidecars").mkdir(parents=True)
    came = make(home.models / "hub-a--b" / "sidecars" / "law", 1)
    model = str(home.models / "hub-a--b" / "m.gguf")
    assert choose_domain(home, model, "law") == Choice("law", came, own=True)
    assert choose_domain(home, str(home.models / "m.gguf"), "law").folder != came
    assert choose_domain(home, model, "none").folder is None and choose_domain(home, model, "code").name == "code"
    with pytest.raises(UsageError, match="--domain nothing: is unknown"):
        choose_domain(home, model, "nothing")


@pytest.mark.long
def test_from_a_repository_to_an_answer(hub: HubServer, tmp_path: Path) -> None:
    folder, port = tmp_path / "d", str(free_port())
    try:
        done = subprocess.run(
            [*words(folder, "--venv", sys.prefix, "--hub", REPO, "--endpoint", hub.url, "--port", port)],
            capture_output=True, text=True, timeout=900, env=dict(os.environ),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"asking: {install.QUESTION}" in done.stdout
    finally:
        run(folder, "stop")
