"""`ds4 fetch` against a hub on this machine: whole folders, second runs, kills, two at once, no network, no room."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ds4.cli.fetch import LOCK
from ds4.cli.main import run as ds4
from ds4.cli.probes import published_sum
from ds4.cli.processes import locked
from ds4.hub import client
from ds4.hub.client import Patience
from ds4.hub.plan import published
from ds4.model import tools
from tests.hub.server import HubServer, cut, flipped, no_ranges, status, trickle, wrong_range
from tests.hub.test_plan import CHECKPOINT, sha

BASE = "someone/base"
OFFICIAL = published()[1].name
PARTS = {f"flash.gguf.part{i}of3": bytes([i]) * (40_000 + i) for i in (1, 2, 3)}
WHOLE = b"".join(PARTS.values())
FILES = PARTS | {f"sidecars/code/gr_L{i:02d}.bin": bytes([i]) * 50 for i in (3, 4)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.Patience, "__init__", _patience(Patience.__init__))


def _patience(made: Any) -> Any:
    def init(self: Patience, **given: Any) -> None:
        made(self, **({"wait_s": 0.0, "longest_s": 0.01} | given))

    return init


@pytest.fixture
def hub(server: HubServer) -> HubServer:
    server.publish(BASE, dict(FILES))
    server.publish(OFFICIAL, dict(CHECKPOINT))
    return server


def fetch(hub: HubServer, folder: Path, *words: str) -> int:
    return ds4(["fetch", BASE, "--to", str(folder), "--endpoint", hub.url, *words])


def there(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in (LOCK, "ds4-fetch.json")
    }


EXPECTED = {
    "flash.gguf": WHOLE, "sidecars/code/gr_L03.bin": b"\3" * 50, "sidecars/code/gr_L04.bin": b"\4" * 50,
    "m-2.safetensors": b"22", "m-3.safetensors": b"333", "encoding/encoding.py": b"#",
}  # fmt: skip


def test_a_whole_folder_and_a_second_run(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch(hub, tmp_path / "d") == 0
    assert there(tmp_path / "d") == EXPECTED
    out = capsys.readouterr()
    assert "6 files" in out.out and "all here and checked" in out.out and BASE in out.out and OFFICIAL in out.out
    assert "flash.gguf: 120,006 bytes, 3 pieces by their sums\n" in out.err
    assert f"m-2.safetensors: 2 bytes, {sha(b'22')}\n" in out.err
    assert "warning: the released words around tools are not in" in out.err  # "#" is no encoding.py of theirs
    hub.tokens.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for words in ([BASE, "--endpoint", hub.url], []):  # a second run asks nobody, and need not be told what
        assert ds4(["fetch", *words, "--to", str(tmp_path / "d"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["complete"] and told["missing_bytes"] == 0 and told["base"] == str(tmp_path / "d" / "flash.gguf")
        assert told["sidecars"] == {"code": str(tmp_path / "d" / "sidecars" / "code")}
        assert told["released_tool_text"] is False and told["bytes"] == sum(map(len, EXPECTED.values()))
        assert {f["name"]: f["here"] for f in told["files"]} == dict.fromkeys(EXPECTED, True)
    assert hub.tokens == []


def test_everything_that_goes_wrong_on_the_way(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.cdn = True
    hub.faults = [  # the first is for the checkpoint's index
        cut(10), None, status(503), no_ranges(15_000), wrong_range(77), status(429, Retry_After="1"), no_ranges(),
        flipped(30_000), cut(20_000), status(500), flipped(41_000), None, trickle(5, 0.0, 3),
    ]  # fmt: skip
    assert fetch(hub, tmp_path) == 0
    assert there(tmp_path) == EXPECTED and not hub.faults
    assert "fetching it again" in capsys.readouterr().err


@pytest.mark.parametrize("listed", [b"other", bytes(40_002)])
def test_sums_are_the_published_ones(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], listed: bytes
) -> None:
    """A hub that keeps sending something else gets nothing into the folder under its name."""
    hub.wrong["flash.gguf.part2of3"] = listed
    assert fetch(hub, tmp_path) == 1
    said = capsys.readouterr().err
    assert "error: " in said and "flash.gguf.part2of3" in said and "Traceback" not in said
    assert not (tmp_path / "flash.gguf").exists()
    assert (tmp_path / "flash.gguf.part").read_bytes() == PARTS["flash.gguf.part1of3"]
    hub.wrong.clear()
    assert fetch(hub, tmp_path) == 1  # the plan is the old one, with the old sum
    assert fetch(hub, tmp_path, "--update") == 0 and there(tmp_path) == EXPECTED


def test_a_run_that_was_cut_goes_on_with_the_commit_that_it_began_with(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever was published meanwhile; --update takes that, and only what differs."""
    hub.faults = [None, None, status(404)]  # index, the first piece
    assert fetch(hub, tmp_path) == 1
    newer = {k: v[::-1] + b"!" if "part" in k else v for k, v in FILES.items()} | {"sidecars/law/gr_L03.bin": b"n"}
    hub.publish(BASE, newer)
    hub.asked.clear()
    assert fetch(hub, tmp_path) == 0 and there(tmp_path) == EXPECTED
    assert "flash.gguf.part1of3" not in [name for name, _ in hub.asked]
    hub.asked.clear()
    capsys.readouterr()
    assert fetch(hub, tmp_path, "--update") == 0
    whole = b"".join(newer[k] for k in PARTS)
    assert there(tmp_path) == EXPECTED | {"flash.gguf": whole, "sidecars/law/gr_L03.bin": b"n"}
    assert sorted({name for name, _ in hub.asked}) == sorted([*PARTS, "sidecars/law/gr_L03.bin", _INDEX])
    hub.publish(BASE, {"flash.gguf": b"one"})
    hub.commits = {k: v for k, v in hub.commits.items() if not k.startswith(BASE) or v == {"flash.gguf": b"one"}}
    (tmp_path / "flash.gguf").unlink()
    assert fetch(hub, tmp_path) == 1  # what was begun with is gone
    assert "is not there" in capsys.readouterr().err
    assert fetch(hub, tmp_path, "--update") == 0
    assert (
        "is no longer among the files" in capsys.readouterr().err and (tmp_path / "flash.gguf").read_bytes() == b"one"
    )


_INDEX = "model.safetensors.index.json"


def test_damage_is_found_and_mended(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes always, bytes with --verify; a dry run only says it."""
    assert fetch(hub, tmp_path) == 0
    base = tmp_path / "flash.gguf"
    base.write_bytes(WHOLE[:50_000] + b"?" + WHOLE[50_001:])
    (tmp_path / "m-2.safetensors").write_bytes(b"2")
    (tmp_path / "m-3.safetensors").unlink()
    capsys.readouterr()
    assert fetch(hub, tmp_path, "--dry-run", "--verify") == 0
    out, err = capsys.readouterr()
    assert "no longer fits its published sum" in err and "has 1 bytes, published are 2" in err and "is gone" in err
    assert "120,011 of" in out and "to fetch" in out and "there is room" in out
    hub.asked.clear()
    assert fetch(hub, tmp_path) == 0
    assert sorted(name for name, _ in hub.asked) == ["m-2.safetensors", "m-3.safetensors"]
    hub.faults = [status(404)]
    assert fetch(hub, tmp_path, "--verify") == 1  # it goes on next time, damaged file or not
    assert fetch(hub, tmp_path) == 0 and there(tmp_path) == EXPECTED


def test_files_that_were_there_before(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that fits is taken as it is; one that does not is somebody's, and stays."""
    (tmp_path / "flash.gguf").write_bytes(WHOLE)
    (tmp_path / "m-3.safetensors").write_bytes(b"my own")
    assert fetch(hub, tmp_path) == 1
    assert "m-3.safetensors: is there already and is not what" in capsys.readouterr().err
    assert (tmp_path / "m-3.safetensors").read_bytes() == b"my own" and set(there(tmp_path)) == {
        "flash.gguf",
        "m-3.safetensors",
    }
    (tmp_path / "m-3.safetensors").unlink()
    hub.asked.clear()
    assert fetch(hub, tmp_path) == 0 and there(tmp_path) == EXPECTED
    assert not any("flash" in name for name, _ in hub.asked)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_no_room(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before a byte comes, with both numbers; what a `.part` holds needs no room again."""
    monkeypatch.setattr("ds4.hub.fetch.RESERVE", 0)
    hub.faults = [None, None, cut(39_000), status(404)]
    assert fetch(hub, tmp_path) == 1
    held, need = (tmp_path / "flash.gguf.part").stat().st_size, sum(map(len, EXPECTED.values()))
    assert held == 40_001 + 39_000
    capsys.readouterr()
    for free, code in ((need - held - 1, 1), (need - held, 0)):
        monkeypatch.setattr("ds4.hub.fetch.shutil.disk_usage", lambda _, free=free: Usage(10**9, 0, free))
        hub.asked.clear()
        assert fetch(hub, tmp_path, "--dry-run") == 0
        assert ("no room: " in capsys.readouterr().out) == (code == 1)
        assert fetch(hub, tmp_path) == code
        assert bool(hub.asked) == (code == 0)
        assert ("GB are free" in capsys.readouterr().err) == (code == 1)
    assert there(tmp_path) == EXPECTED


def test_a_dry_run_leaves_nothing(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch(hub, tmp_path / "d", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "flash.gguf, in 3 pieces" in out and "120,006" in out and not (tmp_path / "d").exists()
    assert fetch(hub, tmp_path / "d", "--dry-run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["complete"] and told["missing_bytes"] == told["bytes"] and told["no_room"] is None


def test_two_at_once(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(tmp_path / LOCK, ""):
        assert fetch(hub, tmp_path) == 1
    assert f"another fetch (process {os.getpid()}) is at work in {tmp_path}" in capsys.readouterr().err
    assert hub.asked == [] and fetch(hub, tmp_path) == 0


def command(hub: HubServer, folder: Path) -> list[str]:
    return [sys.executable, "-m", "ds4.cli.main", "fetch", BASE, "--to", str(folder), "--endpoint", hub.url]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ended_in_the_middle(hub: HubServer, tmp_path: Path, number: int) -> None:
    """The command itself, while bytes come: the next one goes on behind the pieces that were whole."""
    hub.faults = [None, None, None, trickle(1000, 0.05, 200)]
    part = tmp_path / "flash.gguf.part"
    with subprocess.Popen(command(hub, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 81_000) and time.monotonic() < deadline:
            time.sleep(0.01)
        p.send_signal(number)
        said = p.communicate(timeout=60)[1]
    assert p.returncode == (130 if number == signal.SIGINT else -9) and "Traceback" not in said
    assert not (tmp_path / "flash.gguf").exists()
    hub.asked.clear()
    assert fetch(hub, tmp_path) == 0 and there(tmp_path) == EXPECTED
    first, asked = hub.asked[0]
    assert first == "flash.gguf.part3of3" and (asked == "bytes=0-40002") == (number == signal.SIGKILL)


def test_the_released_words_around_tools(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come with the shards, beside the base, and are known by their own hashes."""
    prefix, suffix = "## Tools\n\nthe words before {dsml_token}\n\n", "\n\nand behind.\n"
    text = prefix.replace("{dsml_token}", tools.DSML)
    monkeypatch.setattr(tools, "PREFIX_SHA256", sha(text.encode()).partition(":")[2])
    monkeypatch.setattr(tools, "SUFFIX_SHA256", sha(suffix.encode()).partition(":")[2])
    source = f"TEMPLATE = {prefix + '{tool_schemas}' + suffix!r}\n"
    hub.publish(OFFICIAL, CHECKPOINT | {"encoding/encoding.py": source.encode()})
    assert fetch(hub, tmp_path) == 0
    assert "warning" not in capsys.readouterr().err
    found = tools.load_tool_text(tmp_path)
    assert found is not None and found.released and (found.prefix, found.suffix) == (text, suffix)
    hub.publish(OFFICIAL, {k: v for k, v in CHECKPOINT.items() if "encoding" not in k})
    assert fetch(hub, tmp_path / "without", "--json") == 0
    out, err = capsys.readouterr()
    assert "no encoding/encoding.py came" in err and json.loads(out)["released_tool_text"] is False


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "no base is published for this release yet. One is made of the official checkpoint"),
        (["nonsense"], 2, "fetch nonsense: expected OWNER/REPO"),
        ([BASE, "--shards", "nonsense"], 2, "--shards nonsense: expected OWNER/REPO"),
        ([BASE, "--manifest", "/no/such"], 2, "--manifest /no/such: cannot be read"),
        ([BASE, "--to", "LICENSE"], 2, "--to LICENSE: is a file"),
        ([BASE, "--endpoint", "here"], 2, "--endpoint here"),
        ([BASE, "--file", "x"], 2, "no file is called x"),
        (["someone/none"], 1, "no such repository, or it is not open to all"),
        ([f"{BASE}@v9"], 1, "has no such revision"),
    ],
)
def test_what_is_refused(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], code: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LICENSE").write_text("")
    where = [] if "--endpoint" in words else ["--endpoint", hub.url]
    assert ds4(["fetch", *words, *where]) == code
    assert said in capsys.readouterr().err and hub.asked == []
    assert [p.name for p in tmp_path.iterdir()] == ["LICENSE"]


def test_a_fetch_that_fails_leaves_no_folder_and_no_lock(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = tmp_path / "a" / "b"
    failing = ["fetch", "someone/none", "--endpoint", hub.url, "--to"]
    assert ds4([*failing, str(below)]) == 1 and list(tmp_path.iterdir()) == []
    below.mkdir(parents=True)  # it was there before: it stays
    assert ds4([*failing, str(below)]) == 1 and list(below.iterdir()) == []
    with locked(below / LOCK, ""):  # somebody else's
        assert ds4([*failing, str(below)]) == 1 and (below / LOCK).exists()
    assert "another fetch" in capsys.readouterr().err


def test_records_that_cannot_be_read(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "ds4-fetch.json"
    for text, said in (
        ("{", "is no record of a fetch"), ('{"format": 9}', "is of format 9"),
        ('{"format": 1, "files": [{"name": "../a", "pieces": []}]}', "no plain file name"),
    ):  # fmt: skip
        record.write_text(text)
        assert fetch(hub, tmp_path) == 1
        assert said in capsys.readouterr().err
    record.unlink()
    assert fetch(hub, tmp_path) == 0
    assert ds4(["fetch", "--to", str(tmp_path), "--shards", "none"]) == 2
    assert "--shards needs the repository too" in capsys.readouterr().err


def test_plain_http_and_one_manifest_of_ones_own(hub: HubServer, tmp_path: Path) -> None:
    """--no-xet reaches the hub; a manifest pins which bytes are accepted."""
    told = {
        "format": 1, "base": "mine.gguf", "files": [
            {"name": "mine.gguf", "size": len(WHOLE), "sum": sha(WHOLE), "parts": [
                {"path": name, "size": len(data), "sum": sha(data)} for name, data in PARTS.items()]}],
    }  # fmt: skip
    (tmp_path / "m.json").write_text(json.dumps(told))
    words = ["--manifest", str(tmp_path / "m.json"), "--shards", "none", "--no-xet"]
    assert fetch(hub, tmp_path / "d", *words) == 0
    assert there(tmp_path / "d") == {"mine.gguf": WHOLE}
    assert published_sum(tmp_path / "d" / "mine.gguf") == (sha(WHOLE).partition(":")[2], "ds4-fetch.json")
    assert published_sum(tmp_path / "d" / "other.gguf") is None  # what `ds4 doctor --full` compares with
    (tmp_path / "d" / "SHA256SUMS").write_text(f"{'AB' * 32} *other.gguf\n")
    assert published_sum(tmp_path / "d" / "other.gguf") == ("ab" * 32, "SHA256SUMS")
