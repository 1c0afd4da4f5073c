"""A `.part` through kills, cuts, flipped bits and full disks: it gets its name with every byte right, or never."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import CapacityError, Ds4Error, FileFormatError
from ds4.hub import part as part_module
from ds4.hub.names import Piece, Sum, Wanted
from ds4.hub.part import Part, fits

DATA = bytes(i * 7 % 251 for i in range(10_000))


def sha(data: bytes) -> Sum:
    return Sum("sha256", hashlib.sha256(data).hexdigest())


def wanted(*ends: int, whole: Sum | None = None, name: str = "base.gguf") -> Wanted:
    """DATA in pieces that end there."""
    cuts = [0, *ends, len(DATA)]
    pieces = [DATA[a:b] for a, b in itertools.pairwise(cuts)]
    return Wanted(
        name, tuple(Piece("o/r", "c" * 40, f"{name}.part{i}", len(p), sha(p)) for i, p in enumerate(pieces)), whole
    )


class Line:
    """A source that serves DATA's pieces, `block` bytes at a time, and fails where it is told to."""

    def __init__(self, want: Wanted, block: int = 100) -> None:
        begin, self.at, self.block = 0, {}, block
        for piece in want.pieces:
            self.at[piece.path] = begin
            begin += piece.size
        self.asked: list[tuple[str, int]] = []
        self.flip: list[int] = []  # offsets in DATA, each wrong once
        self.fails_at = -1
        self.error: Exception | KeyboardInterrupt = Ds4Error("the line is gone")

    def stream(self, piece: Piece, start: int) -> Iterator[bytes]:
        self.asked.append((piece.path, start))
        begin, end = self.at[piece.path] + start, self.at[piece.path] + piece.size
        data = bytearray(DATA)
        for at in {at for at in self.flip if begin <= at < end}:
            data[at] ^= 1
            self.flip.remove(at)
        for at in range(begin, end, self.block):
            if 0 <= self.fails_at <= at:
                raise self.error
            yield bytes(data[at : min(at + self.block, end)])


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_one_piece_and_three(tmp_path: Path) -> None:
    for want in (wanted(), wanted(4000, 4001, whole=sha(DATA))):
        seen: list[int] = []
        Part(want, tmp_path, print).complete(Line(want), seen.append)
        assert (tmp_path / "base.gguf").read_bytes() == DATA and names(tmp_path) == ["base.gguf"]
        assert seen[-1] == len(DATA) and seen == sorted(seen)
        assert fits(want, tmp_path / "base.gguf")
        (tmp_path / "base.gguf").unlink()


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    want = Wanted("sub/empty", (Piece("o/r", "c" * 40, "empty", 0, sha(b"")),))
    Part(want, tmp_path, print).complete(Line(want))
    assert (tmp_path / "sub" / "empty").read_bytes() == b"" and names(tmp_path / "sub") == ["empty"]


@pytest.mark.parametrize("error", [Ds4Error("gone"), KeyboardInterrupt()])
@pytest.mark.parametrize("ends", [(), (4000, 8000)])
def test_another_run_goes_on(tmp_path: Path, ends: tuple[int, ...], error: Exception | KeyboardInterrupt) -> None:
    want = wanted(*ends)
    line = Line(want)
    line.fails_at, line.error = 6100, error
    with pytest.raises(type(error)):
        Part(want, tmp_path, print).complete(line)
    assert names(tmp_path) == ["base.gguf.part", "base.gguf.part.json"]
    assert Part(want, tmp_path, print).held == 6100
    line = Line(want)
    Part(want, tmp_path, print).complete(line)
    assert (tmp_path / "base.gguf").read_bytes() == DATA and names(tmp_path) == ["base.gguf"]
    first = want.pieces[1] if ends else want.pieces[0]
    assert line.asked[0] == (first.path, 2100 if ends else 6100) and len(line.asked) == (2 if ends else 1)


def test_pieces_never_take_their_space_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every flush the folder holds the one growing file and its note."""
    most = 0
    fsync = os.fsync

    def look(handle: int) -> None:
        nonlocal most
        most = max(most, sum(p.stat().st_size for p in tmp_path.iterdir() if p.suffix != ".json"))
        assert {n for n in names(tmp_path) if not n.startswith(".")} <= {
            "base.gguf.part",
            "base.gguf.part.json",
            "base.gguf",
        }
        fsync(handle)

    monkeypatch.setattr(os, "fsync", look)
    want = wanted(2500, 5000, 7500, whole=sha(DATA))
    Part(want, tmp_path, print, flush=300).complete(Line(want))
    assert len(DATA) <= most < len(DATA) + 1000


def test_a_flipped_bit_costs_its_piece_only(tmp_path: Path) -> None:
    want = wanted(4000, 8000, whole=sha(DATA))
    line, said = Line(want), []  # type: ignore[var-annotated]
    line.flip = [5000]
    Part(want, tmp_path, said.append).complete(line)
    assert (tmp_path / "base.gguf").read_bytes() == DATA
    assert [p for p, _ in line.asked] == ["base.gguf.part0", "base.gguf.part1", "base.gguf.part1", "base.gguf.part2"]
    assert len(said) == 1 and "published is sha256:" in said[0] and "fetching it again" in said[0]


def test_what_never_fits_never_gets_its_name(tmp_path: Path) -> None:
    want = wanted(4000, 8000)
    for _ in range(2):  # a second run finds the first piece whole
        line = Line(want)
        line.flip = [5000, 5000]
        with pytest.raises(FileFormatError, match=r"base.gguf.part1: came with .*, 2 times; try another --endpoint"):
            Part(want, tmp_path, print).complete(line)
        assert names(tmp_path) == ["base.gguf.part", "base.gguf.part.json"]
        assert (tmp_path / "base.gguf.part").read_bytes() == DATA[:4000]
    assert line.asked == [("base.gguf.part1", 0)] * 2


def test_pieces_that_fit_and_a_whole_that_does_not(tmp_path: Path) -> None:
    want = wanted(4000, whole=sha(DATA[::-1]))
    with pytest.raises(FileFormatError, match=r"its 2 pieces fit their sums.*contradicts itself"):
        Part(want, tmp_path, print).complete(Line(want))
    assert names(tmp_path) == []


@pytest.mark.parametrize("what", ["flipped", "cut", "longer", "note of another", "no note", "nonsense", "lies"])
def test_a_part_that_somebody_touched(tmp_path: Path, what: str) -> None:
    """Whatever lies there: the file that gets the name is the published one."""
    want = wanted(4000, 8000)
    line = Line(want)
    line.fails_at = 9000
    with pytest.raises(Ds4Error):
        Part(want, tmp_path, print).complete(line)
    path, note = tmp_path / "base.gguf.part", tmp_path / "base.gguf.part.json"
    data = path.read_bytes()
    told = json.loads(note.read_bytes())
    if what == "flipped":  # in the piece under way; a whole one was checked, and --verify reads it again
        path.write_bytes(data[:8500] + b"\0" + data[8501:])
    elif what == "cut":
        path.write_bytes(data[:3000])
    elif what == "longer":
        path.write_bytes(data + b"x" * 5000)
    elif what == "note of another":
        note.write_text(json.dumps(told | {"wanted": ["1 sha256:" + "0" * 64]}))
    elif what == "no note":
        note.unlink()
    elif what == "nonsense":
        note.write_text('{"whole": "all"')
    else:
        note.write_text(json.dumps(told | {"whole": 3, "flushed": len(DATA)}))
    held = {"flipped": 9000, "cut": 3000, "longer": 9000}.get(what, 0)
    assert Part(want, tmp_path, print).held == held or what == "lies"
    Part(want, tmp_path, print).complete(Line(want))
    assert (tmp_path / "base.gguf").read_bytes() == DATA and names(tmp_path) == ["base.gguf"]


@pytest.mark.parametrize("when", ["write", "fsync", "note"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """One message that says what to do; with room again the next run goes on."""
    want, left = wanted(4000), 6000

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = part_module._write

    def some(f: Any, block: bytes) -> None:
        if f.tell() + len(block) > left:
            f.write(block[:50])
            full()
        write(f, block)

    with monkeypatch.context() as m:
        if when == "write":
            m.setattr(part_module, "_write", some)
        elif when == "fsync":
            m.setattr(part_module.os, "fsync", full)
        else:
            m.setattr(part_module, "write_beside", full)
        with pytest.raises(CapacityError, match=r"No space left.*run the same command again"):
            Part(want, tmp_path, print, flush=1000).complete(Line(want))
    assert not (tmp_path / "base.gguf").exists()
    held = Part(want, tmp_path, print).held
    assert held == (6050 if when == "write" else 0)
    Part(want, tmp_path, print).complete(Line(want))
    assert (tmp_path / "base.gguf").read_bytes() == DATA


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    want = wanted(name="file/base.gguf")
    with pytest.raises(Ds4Error, match="choose a folder that can be written"):
        Part(want, tmp_path, print).complete(Line(want))
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "base.gguf.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Ds4Error):
        Part(wanted(), tmp_path, print).complete(Line(wanted()))
    assert (tmp_path / "elsewhere").read_text() == "mine"


KILLED = """
import sys
from pathlib import Path
from tests.hub.test_part import Line, wanted
from ds4.hub.part import Part
want = wanted(4000, 8000)
def slowly(at):
    print(at, flush=True)
    sys.stdin.readline()
Part(want, Path(sys.argv[1]), print, flush=700).complete(Line(want), slowly)
"""


def test_killed_in_the_middle_of_everything(tmp_path: Path) -> None:
    """kill -9 at a block in each piece, in one folder; what was flushed is not fetched again."""
    want, flushed = wanted(4000, 8000), 0
    for stop in (900, 4000, 5500, 8100):
        words = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
            assert p.stdin is not None and p.stdout is not None
            for line in p.stdout:
                if int(line) >= stop:
                    p.send_signal(signal.SIGKILL)
                    break
                p.stdin.write("\n")
                p.stdin.flush()
        assert not (tmp_path / "base.gguf").exists()
        held = Part(want, tmp_path, print).held
        assert stop - 800 <= held and held >= flushed
        flushed = held
    line = Line(want)
    Part(want, tmp_path, print).complete(line)
    assert (tmp_path / "base.gguf").read_bytes() == DATA and names(tmp_path) == ["base.gguf"]
    assert sum(want.pieces[2].size - start for _, start in line.asked) == len(DATA) - flushed


@settings(max_examples=50, deadline=None)
@given(
    ends=st.lists(st.integers(1, len(DATA) - 1), unique=True, max_size=4).map(sorted),
    stops=st.lists(st.integers(0, len(DATA)), max_size=4),
    flips=st.lists(st.integers(0, len(DATA) - 1), max_size=2),
    block=st.integers(40, 3000),
    flush=st.integers(300, 5000),
)
def test_any_interruptions(
    tmp_path_factory: pytest.TempPathFactory,
    ends: list[int],
    stops: list[int],
    flips: list[int],
    block: int,
    flush: int,
) -> None:
    folder, want = tmp_path_factory.mktemp("any"), wanted(*ends, whole=sha(DATA))
    line = Line(want, block)
    line.flip = list(flips)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "fsync", lambda handle: None)  # of a disk that others use too
        for stop in [*stops, -1, -1]:
            line.fails_at = stop
            try:
                Part(want, folder, lambda _: None, flush).complete(line)
            except Ds4Error:
                assert not (folder / "base.gguf").exists()
                continue
            break
    assert (folder / "base.gguf").read_bytes() == DATA and names(folder) == ["base.gguf"]


def test_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "base.gguf"
    path.write_bytes(DATA)
    assert fits(wanted(), path) and fits(wanted(1, 2), path) and fits(wanted(5000, whole=sha(DATA)), path)
    assert not fits(wanted(5000, whole=sha(b"")), path)
    path.write_bytes(DATA[:-1] + b"?")
    assert not fits(wanted(5000), path) and not fits(wanted(), path)
    path.write_bytes(DATA + b"?")
    assert not fits(wanted(), path)
    with pytest.raises(Ds4Error, match="absent"):
        fits(wanted(), tmp_path / "absent")
