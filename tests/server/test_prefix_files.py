"""Kept texts in an index and in files: found at once, checked before they are believed, thrown away in time."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds4.cli.serve import make_prefixes, parse
from ds4.engine import keep_file
from ds4.engine.keep import Mark, save
from ds4.errors import Ds4Error, UsageError
from ds4.server import prefix_folder
from ds4.server.prefix_folder import SUFFIX, PrefixFolder
from ds4.server.prefix_index import BLOCK, Entry, PrefixIndex, chain_of
from ds4.server.prefixes import Prefixes
from tests.engine.kept import snapshot_of
from tests.server.prefixed import FakeEngine, kept_texts, served, text_of

# ---- the index


def test_a_thousand_long_texts_are_looked_through_at_once() -> None:
    """1,000 entries of 100,000 tokens, half of them of one beginning: what is asked of them costs the prompt's own
    hashes, not theirs.
    """
    index, ids = PrefixIndex(), np.arange(100_000, dtype=np.int32)
    chain = chain_of(ids, "one")
    rng = np.random.default_rng(1)
    for i in range(1000):
        own = rng.bytes(8 * (781 - (400 if i % 2 else 0)))
        other = chain[: 8 * 400] + own if i % 2 else own
        index.add(Entry("one", other, marks_at(51_200 + 40 * i, 100_000)))
    index.add(best := Entry("one", chain, marks_at(99_000, 100_000)))
    prompt_chain = chain_of(np.concatenate([ids[:99_990], ids[:5000]]), "one")
    began = time.process_time()
    groups = list(index.find(prompt_chain, "one"))
    took = time.process_time() - began
    assert groups[0][0].entry is best and groups[0][0].mark.position == 100_000
    assert index.shared(prompt_chain) == 99_990 // BLOCK * BLOCK
    assert index.shared(chain_of(ids[:60_000] + 1, "one")) == 0
    assert took < 0.1, f"{took:.3f} s of the processor"
    assert not list(index.find(prompt_chain, "two"))


def marks_at(*positions: int) -> tuple[Mark, ...]:
    return tuple(Mark(p, p, 0, p, True) for p in positions)


def test_a_removed_text_is_found_no_more() -> None:
    index, chain = PrefixIndex(), chain_of(np.arange(1000, dtype=np.int32), "one")
    first, second = (Entry("one", chain, marks_at(500, 1000)) for _ in range(2))
    index.add(first)
    index.add(second)
    index.remove(first)
    index.remove(first)
    assert {c.entry for group in index.find(chain, "one") for c in group} == {second}
    assert index.entries() == [second] and first not in index
    index.remove(second)
    assert not list(index.find(chain, "one")) and index.shared(chain) == 0


def test_a_chain_tells_texts_apart_block_by_block() -> None:
    ids = np.arange(1000, dtype=np.int32)
    chain = chain_of(ids, "one")
    assert len(chain) == 8 * (1000 // BLOCK) and chain_of(ids[:300], "one") == chain[: 8 * (300 // BLOCK)]
    other = ids.copy()
    other[BLOCK] += 1
    changed = chain_of(other, "one")
    assert changed[:8] == chain[:8] and all(changed[i : i + 8] != chain[i : i + 8] for i in range(8, len(chain), 8))


def test_hashes_are_not_believed_without_the_tokens() -> None:
    """Another text under the same hashes, as a collision would have it: refused, and the prompt computed."""
    engine, prefixes, ids = FakeEngine(), kept_texts(), text_of(300)
    other = [t + 1 for t in ids]
    chain = chain_of(np.asarray(ids, np.int32), "one")
    text = save(snapshot_of(other), 300)
    prefixes._store.add(Entry("one", chain, text.marks), text, [], write=False, replaced=None)
    assert served(prefixes, engine, ids) == 0
    assert prefixes.stats.refused["other_text"] == 1


# ---- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def reopened(folder: Path, memory: int = 1 << 30, disk: int = 1 << 30) -> Prefixes:
    return kept_texts(memory, PrefixFolder(folder, disk))


def names(folder: Path) -> list[str]:
    return sorted(n for n in os.listdir(folder) if n != "lock")


def filled(folder: Path, *texts: list[int]) -> None:
    """What a server that answered these prompts leaves."""
    prefixes = reopened(folder)
    for ids in texts:
        served(prefixes, FakeEngine(), ids)
        prefixes.flush()
    prefixes.close()


def test_the_next_server_goes_on_from_files(folder: Path) -> None:
    ids = text_of(500)
    filled(folder, ids[:300], ids, text_of(200, 2))
    assert len(names(folder)) == 2, "the longer text took the shorter one's place"
    assert folder.stat().st_mode & 0o777 == 0o700
    prefixes = reopened(folder)
    assert (prefixes.stats.disk_entries, prefixes.stats.memory_entries) == (2, 0)
    assert prefixes.stats.disk_bytes == sum((folder / n).stat().st_size for n in names(folder))
    assert served(prefixes, FakeEngine(), [*ids, 7]) == 500
    assert served(prefixes, FakeEngine(), [*ids[:300], 8]) == 300, "an inherited point"
    assert (prefixes.stats.disk_hits, prefixes.stats.hits) == (1, 2), "read once"
    prefixes.close()


def test_starting_reads_headers_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(folder, text_of(3000))
    read: list[int] = []

    def watched(path: Path) -> Any:
        found = keep_file.read_header(path)
        read.append(found.data)
        return found

    monkeypatch.setattr(prefix_folder, "read_header", watched)
    monkeypatch.setattr(prefix_folder, "read", lambda path: pytest.fail("an array was read"))
    prefixes = reopened(folder)
    assert len(read) == 1 and read[0] < 6000 < (folder / names(folder)[0]).stat().st_size
    prefixes.close()


@pytest.mark.parametrize(
    ("damage", "reason", "removed"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "truncated", True),
        (lambda p: p.write_bytes(b""), "truncated", True),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "truncated", True),
        (lambda p: p.write_bytes(b"x" + p.read_bytes()[1:]), "broken", True),
        (lambda p: p.write_bytes(p.read_bytes()[:8] + b"\x09" + p.read_bytes()[9:]), "version", False),
        (lambda p: p.write_bytes(p.read_bytes()[:-5] + b"\xff" + p.read_bytes()[-4:]), "broken", True),
        (lambda p: (p.unlink(), p.mkdir()), "unreadable", False),
    ],
)
def test_a_damaged_file_is_told_counted_and_computed_again(
    folder: Path, damage: Callable[[Path], object], reason: str, removed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ids = text_of(300)
    filled(folder, ids)
    (name,) = names(folder)
    damage(folder / name)
    prefixes = reopened(folder)
    assert served(prefixes, FakeEngine(), [*ids, 7]) == 0
    assert {k: n for k, n in prefixes.stats.refused.items() if n} == {reason: 1}
    assert len([r for r in caplog.records if name in r.getMessage()]) == 1
    prefixes.flush()
    assert (name in names(folder)) is not removed
    assert served(prefixes, FakeEngine(), [*ids, 8]) == 300, "and kept again"
    prefixes.close()


def test_a_file_that_is_damaged_while_the_server_runs(folder: Path) -> None:
    ids = text_of(300)
    filled(folder, ids)
    prefixes = reopened(folder)
    path = folder / names(folder)[0]
    path.write_bytes(path.read_bytes()[:-100])
    assert served(prefixes, FakeEngine(), [*ids, 7]) == 0
    assert prefixes.stats.refused["truncated"] == 1 and not path.exists()
    prefixes.close()


def test_anothers_files_are_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = text_of(300)
    filled(folder, ids)
    caplog.set_level("INFO", "ds4.server")
    prefixes = reopened(folder)
    other = FakeEngine(identity="two")
    assert [served(prefixes, other, [*ids, 7]) for _ in range(2)] == [0, 301]
    assert prefixes.stats.refused["foreign"] == 1
    assert len([r for r in caplog.records if "another model" in r.getMessage()]) == 1
    assert served(prefixes, FakeEngine(), ids) == 300
    prefixes.close()


def test_the_folder_holds_what_it_may_and_the_oldest_goes(folder: Path) -> None:
    texts = [text_of(1000, seed) for seed in range(1, 5)]
    filled(folder, *texts[:3])
    sizes = [(folder / n).stat().st_size for n in names(folder)]
    prefixes = reopened(folder, memory=0, disk=(most := sum(sizes) + 2000))
    assert served(prefixes, FakeEngine(), [*texts[0], 5]) == 1000  # used now
    prefixes.flush()
    served(prefixes, FakeEngine(), texts[3])
    prefixes.flush()
    assert prefixes.stats.evicted_files == 1 and prefixes.stats.disk_bytes <= most
    assert sum((folder / n).stat().st_size for n in names(folder)) == prefixes.stats.disk_bytes
    prefixes.close()
    smaller = reopened(folder, disk=sizes[0] + 1000)
    assert smaller.stats.disk_entries == 1 == len(names(folder))
    assert served(smaller, FakeEngine(), [*texts[3], 5]) == 1000, "the newest is left"
    smaller.close()


def test_without_memory_texts_are_served_from_files(folder: Path) -> None:
    prefixes, ids = reopened(folder, memory=0), text_of(300)
    served(prefixes, FakeEngine(), ids)
    prefixes.flush()
    assert [served(prefixes, FakeEngine(), ids) for _ in range(2)] == [300, 300]
    assert prefixes.stats.disk_hits == 2 and prefixes.stats.memory_bytes == 0
    prefixes.close()


@pytest.mark.parametrize("broken", ["statvfs", "fsync", "open"])
def test_a_full_disk_costs_the_text_and_nothing_else(
    folder: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last gigabyte is left to others; the disk fills up meanwhile; nothing can be made at all."""
    prefixes, ids = reopened(folder), text_of(300)
    real = getattr(os, broken)

    def full(*args: Any, **kw: Any) -> Any:
        if broken == "open" and SUFFIX not in str(args[0]):
            return real(*args, **kw)
        if broken == "statvfs":
            return SimpleNamespace(f_bavail=1 << 18, f_frsize=4096)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, broken, full)
        for seed in (1, 2):
            served(prefixes, FakeEngine(), text_of(300, seed))
            prefixes.flush()
    assert names(folder) == [] and prefixes.stats.refused["disk_full"] == 2
    assert len([r for r in caplog.records if "not written" in r.getMessage()]) == 1, "said once"
    assert served(prefixes, FakeEngine(), [*ids, 7]) == 300, "from memory"
    prefixes.flush()
    assert len(names(folder)) == 1
    prefixes.close()


def test_a_slow_disk_delays_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list is short: what finds it full stays in memory only."""
    prefixes, gate, asked = reopened(folder), threading.Event(), threading.Event()
    real = PrefixFolder.write

    def slow(self: PrefixFolder, *args: Any) -> Any:
        asked.set()
        assert gate.wait(20)
        return real(self, *args)

    monkeypatch.setattr(PrefixFolder, "write", slow)
    for seed in range(6):
        served(prefixes, FakeEngine(), text_of(300, seed))
        assert asked.wait(20)
    assert prefixes.stats.memory_entries == 6 and prefixes.stats.refused["busy"] >= 3
    gate.set()
    prefixes.flush()
    assert 2 <= len(names(folder)) <= 3
    prefixes.close()


def test_what_was_forgotten_while_it_waited_is_found_in_its_file(folder: Path) -> None:
    prefixes, ids = reopened(folder), text_of(300)
    served(prefixes, FakeEngine(), ids)
    prefixes.forget()
    prefixes.flush()
    assert served(prefixes, FakeEngine(), ids) == 300 and prefixes.stats.disk_hits == 1
    prefixes.close()


def test_a_folder_is_one_servers(folder: Path) -> None:
    prefixes = reopened(folder)
    with pytest.raises(Ds4Error, match="another server keeps its texts there"):
        PrefixFolder(folder, 1)
    prefixes.close()
    PrefixFolder(folder, 1).close()


def test_a_half_written_file_is_gone_at_the_next_start(folder: Path) -> None:
    filled(folder, text_of(300))
    (folder / f"x{SUFFIX}.part").write_bytes(b"half")
    (folder / "notes.txt").write_text("somebody's")
    reopened(folder).close()
    assert f"x{SUFFIX}.part" not in names(folder) and "notes.txt" in names(folder)


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        PrefixFolder(tmp_path, 1)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "no" / "where"):
        with pytest.raises(UsageError, match=f"--prefix-dir {path}: "):
            PrefixFolder(path, 1)


# ---- flags


@pytest.mark.parametrize(
    "flags",
    [
        ["--prefix-memory-mb", "-1"], ["--prefix-dir", "d", "--prefix-reuse", "off"], ["--prefix-disk-mb", "5"],
        ["--prefix-disk-mb", "0", "--prefix-dir", "d"],
    ],
)  # fmt: skip
def test_flags_that_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError, match=flags[0]):
        parse(["-m", "x.gguf", *flags])


def test_flags_that_are_understood(folder: Path) -> None:
    assert make_prefixes(parse(["-m", "x.gguf", "--prefix-reuse", "off"])) is None
    assert make_prefixes(parse(["-m", "x.gguf"])) is not None and not folder.exists()
    kept = make_prefixes(parse(["-m", "x.gguf", "--prefix-reuse", "decoded", "--prefix-dir", str(folder)]))
    assert kept is not None and os.listdir(folder) == ["lock"]
    kept.close()
