"""What is kept of a text: points that share its rows, rules that say whom they serve, and files that may lie."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.device.build import Builder
from ds4.engine import Engine, keep
from ds4.engine.choose import Drawn
from ds4.engine.keep import MOST_POINTS, Mark, Rules, can_keep, common_prefix, identity_of, save
from ds4.engine.keep_file import KeepError, read, read_header, write
from ds4.errors import Ds4Error
from tests.engine.kept import same, snapshot_of

TEXT = [(7 * i + i * i) % 300 for i in range(400)]
FULL = Rules(window=18, bounded=False, chunk=16, decoded=False)
REPLAY = replace(FULL, bounded=True)


def saved(*ends: int, draft: bool = True) -> keep.Saved:
    """The text up to the last end, with a point at each."""
    out = save(snapshot_of(TEXT[: ends[0]], draft=draft), 10_000)
    for end in ends[1:]:
        out = save(snapshot_of(TEXT[:end], draft=draft), 10_000, out.points)
    return out


def test_points_share_the_rows_of_their_text_and_come_back_to_the_byte() -> None:
    text = saved(100, 164, 300)
    for i, end in enumerate((100, 164, 300)):
        assert same(text.snapshot(i), snapshot_of(TEXT[:end], draft=True))
    alone = sum(saved(end).nbytes for end in (100, 164, 300))
    rows = sum(a.nbytes for a in text.rows.values())
    assert rows == 300 * 6 + 150 * 6
    assert text.nbytes == rows + text.tokens.nbytes + sum(p.nbytes for p in text.points) < alone


def test_drawn_tokens_that_wait_are_not_kept() -> None:
    waiting = replace(snapshot_of(TEXT[:50]), waiting=(Drawn(3, -0.5),))
    with pytest.raises(Ds4Error, match="take them back"):
        save(waiting, 50)


def test_a_drawn_token_that_was_not_run_is_no_part_of_the_text() -> None:
    text = save(snapshot_of(TEXT[:51], position=50), 40)
    assert list(text.tokens) == TEXT[:50]
    assert text.marks == (Mark(50, 50, 0, 40, False),) and text.points[0].logits is None


def test_points_thin_out_with_the_distance_from_the_end() -> None:
    text = saved(*range(20, 401, 20))
    at = [m.position for m in text.marks]
    gaps = np.diff([0, *at])
    assert len(at) == MOST_POINTS and at[-1] == 400
    assert at[-2] >= 360 and gaps[0] > gaps[-1] and all(a >= b for a, b in zip(gaps, gaps[2:]))
    for i, end in enumerate(at):
        assert same(text.snapshot(i), snapshot_of(TEXT[:end], draft=True))


def test_points_that_save_next_to_nothing_are_not_kept() -> None:
    """Turns of a few tokens leave the last end and the one before it; each of the others saves a pass."""
    out = save(snapshot_of(TEXT[:60]), 400)
    for end in (70, 80, 200, 210, 220, 290, 300):
        out = save(snapshot_of(TEXT[:end]), 400, out.points, gap=64)
    assert [m.position for m in out.marks] == [60, 80, 200, 220, 290, 300]
    assert same(out.snapshot(1), snapshot_of(TEXT[:80]))


def mark(position: int, **other: int | bool) -> Mark:
    return replace(Mark(position, position, 0, position, True), **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("common", "wanted", "kept"),
    [
        (200, 300, 200),  # goes on
        (200, 200, 200), (200, 201, 200),
        (199, 300, 199), (136, 300, 136), (135, 300, 0),  # 64 positions can be taken back
        (150, 150, 149),  # a beginning of the text: the last token is run
        (136, 136, 0), (137, 137, 136), (0, 5, 0),
    ],
)  # fmt: skip
def test_full_prefill_takes_the_newest_positions_back(common: int, wanted: int, kept: int) -> None:
    assert FULL.kept(mark(200), common, wanted) == kept


@pytest.mark.parametrize(
    ("common", "wanted", "kept"),
    [
        (200, 219, 200), (200, 500, 200),
        (200, 218, 0), (200, 201, 0),  # no more than a window follows: its rows would show
        (199, 300, 0),  # nothing can be taken back
        (200, 200, 200),  # the same prompt
        (150, 150, 0),
    ],
)  # fmt: skip
def test_a_bounded_replay_hides_what_was_before_it_or_is_not_gone_on_from(
    common: int, wanted: int, kept: int
) -> None:
    assert REPLAY.kept(mark(200, first=182), common, wanted) == kept


def test_the_same_prompt_needs_its_logits() -> None:
    part = mark(200, first=200, whole=False)
    assert REPLAY.kept(part, 200, 200) == 0 and REPLAY.kept(part, 200, 219) == 200
    assert FULL.kept(mark(200, whole=False), 200, 200) == 199


def test_what_decode_made_serves_only_who_asked_for_it() -> None:
    answered = mark(200, exact=180, whole=False)
    loose = replace(FULL, decoded=True)
    assert FULL.kept(answered, 200, 300) == 0 and loose.kept(answered, 200, 300) == 200
    assert FULL.kept(answered, 180, 300) == 180  # the prompt before the answer
    assert loose.same(answered, 180, 300) and not loose.same(answered, 181, 300)
    answered = replace(answered, first=150)
    loose = replace(REPLAY, decoded=True)
    assert REPLAY.kept(answered, 200, 300) == 0 and loose.kept(answered, 200, 210) == 200
    part = mark(200, first=200, whole=False)  # without rows of the upper layers
    assert loose.kept(part, 200, 210) == 0 and loose.kept(part, 200, 219) == 200
    assert not loose.same(mark(200, first=150), 200, 210) and loose.same(mark(200, first=150), 200, 219)


def test_legs_end_at_whole_chunks_and_where_texts_part() -> None:
    assert FULL.legs(0, 100, 0, 16) == [32, 80, 100]  # 4 chunks and one before the end
    assert FULL.legs(0, 16, 0, 16) == [16] and FULL.legs(100, 100, 0, 16) == [100]
    assert FULL.legs(37, 100, 64, 16) == [64, 69, 100]  # from where reading begins, and where it leaves others
    assert FULL.legs(80, 100, 80, 16) == [100]
    assert REPLAY.legs(0, 100, 0, 16) == [32, 80, 100]  # more than a window before the end
    assert REPLAY.legs(0, 100, 90, 16) == [32, 80, 100] and REPLAY.legs(0, 40, 30, 16) == [16, 40]
    assert REPLAY.legs(0, 19, 0, 4) == [19]
    for rules in (FULL, REPLAY):
        for wanted in range(1, 300, 7):
            ends = rules.legs(wanted // 3, wanted, wanted // 2, 8)
            passes = [(b - a - 1) // 16 + 1 for a, b in zip([wanted // 3, *ends], ends)]
            whole = (wanted - wanted // 3 - 1) // 16 + 1
            assert sum(passes) <= whole + 1, "only where texts part there may be one pass more"


def test_common_prefix() -> None:
    text = np.asarray(TEXT, np.int32)
    assert common_prefix(text, TEXT[:30]) == 30 and common_prefix(text[:30], TEXT) == 30
    assert common_prefix(text, [*TEXT[:30], -1, *TEXT[31:]]) == 30 and common_prefix(text, []) == 0


# ---- files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.ds4keep"
    size = write(path, saved(100, 164, 300), "me", b"chain-of" * 2)
    assert size == path.stat().st_size and path.stat().st_mode & 0o777 == 0o600
    return path


def test_a_file_gives_back_what_was_kept(file: Path) -> None:
    header, text = read(file)
    want = saved(100, 164, 300)
    assert header == read_header(file)
    assert (header.identity, header.chain, header.n_tokens, header.marks) == ("me", b"chain-of" * 2, 300, want.marks)
    assert text.marks == want.marks and np.array_equal(text.tokens, want.tokens)
    for i in range(3):
        assert same(text.snapshot(i), want.snapshot(i))
    assert os.listdir(file.parent) == [file.name]


def test_a_text_without_drafts_or_logits_gives_them_back_as_none(tmp_path: Path) -> None:
    path = tmp_path / "y.ds4keep"
    write(path, save(snapshot_of(TEXT[:9], logits=False), 9), "me", b"")
    assert same(read(path)[1].snapshot(0), snapshot_of(TEXT[:9], logits=False))


def test_every_byte_counts(file: Path) -> None:
    """Any byte but padding changed: refused, by the header's sum, an array's, or a size."""
    data = file.read_bytes()
    header = read_header(file)
    padding, at = set(), header.data
    for _, size, _ in header.arrays:
        padding |= set(range(at, at + -at % 64))
        at += -at % 64 + size
    step = 97
    for i in [*range(0, header.data, 31), *(j for j in range(header.data, len(data), step) if j not in padding)]:
        file.write_bytes(data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :])
        with pytest.raises(KeepError) as e:
            read(file)
        assert e.value.reason in ("broken", "truncated", "version"), i


def test_every_length_counts(file: Path) -> None:
    data = file.read_bytes()
    for n in [0, 1, 7, 47, 48, 60, read_header(file).data, len(data) // 2, len(data) - 1, len(data) + 1]:
        file.write_bytes((data + b"\0")[:n])
        for door in (read, read_header):
            with pytest.raises(KeepError) as e:
                door(file)
            assert e.value.reason == "truncated" and e.value.useless, n
    file.write_bytes(data)
    read(file)


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The file with another header, its sum made to match, and the same arrays."""
    data = path.read_bytes()
    length = struct.unpack_from("<I", data, 12)[0]
    header, at, arrays = json.loads(data[48 : 48 + length]), 48 + length, []
    for _, size, _ in header["arrays"]:
        at += -at % 64
        arrays.append(data[at : at + size])
        at += size
    change(header)
    text = json.dumps(header).encode()
    out = data[:12] + struct.pack("<I", len(text)) + sha256(text).digest() + text
    for array in arrays:
        out += b"\0" * (-len(out) % 64) + array
    path.write_bytes(out)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["points"][0].update(position=-1),
        lambda h: h["points"][0].update(position=200),
        lambda h: h["points"][1].update(written=3),
        lambda h: h["points"][2].update(exact=301),
        lambda h: h["points"][0].update(first=True),
        lambda h: h["points"][0]["lengths"].update({"comp.1": 9999}),
        lambda h: h["points"][0]["draft"].pop("first"),
        lambda h: h["points"].pop(),
        lambda h: h.update(points=[]),
        lambda h: h.update(tokens=299),
        lambda h: h["arrays"][0].__setitem__(0, "rows.x"),
        lambda h: h["arrays"][3].__setitem__(1, -6),
        lambda h: h["arrays"][-1].__setitem__(0, "9.logits"),
        lambda h: h.update(chain="zz"),
        lambda h: h.update(identity=None),
        lambda h: h.pop("arrays"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_whatever_its_sum(
    file: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    rewritten(file, lambda h: None)
    read(file)
    rewritten(file, change)
    with pytest.raises(KeepError) as e:
        read(file)
    assert e.value.reason in ("broken", "truncated") and str(file) in str(e.value)


def test_sizes_are_checked_before_memory_is_taken(file: Path) -> None:
    """A header that promises 140 TB, in a file that does not have it."""
    rewritten(file, lambda h: h["arrays"][1].__setitem__(1, (1 << 47) - 1))
    with pytest.raises(KeepError, match="its header says 140737"):
        read(file)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, file: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(file)
    for name in ("pipe", "link", "nothing"):
        with pytest.raises(KeepError) as e:
            read(tmp_path / name)
        assert e.value.reason == "unreadable" and not e.value.useless


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "x", saved(100), "me", b"")
    assert os.listdir(tmp_path) == []


# ---- identity


def test_kernels_that_change_are_others(tmp_path: Path) -> None:
    """Whatever they include, and however they are built."""
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text("// one\n")
    (tmp_path / "cache").mkdir(mode=0o700)

    def mark_now(variant: str = "fast") -> str:
        return Builder(tmp_path, tmp_path / "cache").mark(variant, "sm_121")

    first = mark_now()
    assert mark_now() == first != mark_now("check")
    (tmp_path / "b.cuh").write_text("// two\n")
    assert mark_now() != first


def test_whose_state_it_is(engines: Callable[..., Engine]) -> None:
    """Everything that decides about a bit; not what a pass is cut into."""
    plain = engines("oracle-e")
    assert identity_of(plain) == identity_of(plain)
    others = [
        engines("oracle-a"), engines("oracle-e", prefill="replay"), engines("oracle-e", kv="f32"),
        engines("oracle-e", activations="f32"),
    ]  # fmt: skip
    assert len({identity_of(e) for e in (plain, *others)}) == 5
    assert identity_of(replace(plain, options=replace(plain.options, chunk=7))) == identity_of(plain)
    assert can_keep(plain)
    assert not can_keep(replace(plain, options=replace(plain.options, index_keys="released")))
