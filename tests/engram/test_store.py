"""The row store: right bytes by both ways of reading, counted reads, and every refusal."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from ds4.engram.store import BLOCK_BYTES, RowStore, StoreStats, check_shard
from ds4.errors import Ds4Error, FileFormatError, MissingTensorError
from tests.model.vocabulary import DATA

HEAD_DIM = 256
N_ROWS = 500
GAP = 40  # bytes between codes and scales: neither part is aligned to anything
WEIGHT_OFFSET = 664  # as in the released shards
SCALE_OFFSET = WEIGHT_OFFSET + N_ROWS * HEAD_DIM + GAP

U8 = NDArray[np.uint8]


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, U8]:
    """A file with a table and nothing behind it, and the rows as the store should give them."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (N_ROWS, HEAD_DIM), np.uint8)
    scales = rng.integers(0, 256, (N_ROWS, HEAD_DIM // 32), np.uint8)
    path = tmp_path / "shard.bin"
    path.write_bytes(b"\xff" * WEIGHT_OFFSET + codes.tobytes() + b"\xff" * GAP + scales.tobytes())
    return path, np.concatenate([codes, scales], axis=1)


def store_of(path: Path, **options: Any) -> RowStore:
    return RowStore(path, WEIGHT_OFFSET, SCALE_OFFSET, N_ROWS, HEAD_DIM, **options)


def direct_modes(path: Path) -> list[bool]:
    with store_of(path) as store:
        return [False, True] if store.direct else [False]


CASES = {
    "one": [7],
    "none": [],
    "first and last": [0, N_ROWS - 1],
    "out of order, with repeats": [9, 3, 9, 499, 0, 3, 3],
    "one token": list(range(5, 29)),
    "all": list(range(N_ROWS)),
    "all, backwards": list(range(N_ROWS))[::-1],
}


@pytest.mark.parametrize("name", list(CASES))
def test_rows_are_the_files_bytes(shard: tuple[Path, U8], name: str) -> None:
    path, want = shard
    rows = np.array(CASES[name], np.int64)
    for direct in direct_modes(path):
        with store_of(path, direct=direct, workers=4) as store:
            assert store.direct == direct
            assert np.array_equal(store.read(rows), want[rows])
            ticket = store.prefetch(rows)
            assert np.array_equal(ticket.wait(), want[rows])
            assert np.array_equal(ticket.wait(), want[rows]) and ticket.done


def test_offsets_that_cross_blocks(tmp_path: Path) -> None:
    """Rows whose codes lie in two blocks, at every alignment that 256-byte rows can have."""
    for weight_offset in (0, 1, BLOCK_BYTES - 100, BLOCK_BYTES - 1, 3 * BLOCK_BYTES):
        body = np.random.default_rng(weight_offset).integers(0, 256, weight_offset + 40 * 264, np.uint8)
        path = tmp_path / f"at{weight_offset}"
        path.write_bytes(body.tobytes())
        scale_offset = weight_offset + 40 * 256
        with RowStore(path, weight_offset, scale_offset, 40, 256, workers=2) as store:
            got = store.read(np.arange(40))
        assert np.array_equal(got[:, :256], body[weight_offset:scale_offset].reshape(40, 256))
        assert np.array_equal(got[:, 256:], body[scale_offset:].reshape(40, 8))


def test_reads_are_counted(shard: tuple[Path, U8]) -> None:
    """Two reads a row, a row once however often it is asked for; a token of 24 rows is 6,336 bytes."""
    path, _ = shard
    with store_of(path, direct=False) as store:
        store.read(np.arange(24) * 20)
        assert store.stats == StoreStats(rows=24, reads=48, bytes=24 * 264, waits=0)
        store.read(np.array([4, 4, 4]))
        assert store.stats == StoreStats(rows=27, reads=50, bytes=25 * 264, waits=0)


def test_a_late_wait_is_counted(shard: tuple[Path, U8], monkeypatch: pytest.MonkeyPatch) -> None:
    path, want = shard
    gate = threading.Event()
    real = os.preadv

    def held(*args: Any) -> int:
        gate.wait(60)
        return real(*args)

    with store_of(path, direct=False) as store:
        count = store._waited

        def counted_then_opened() -> None:
            count()
            gate.set()

        monkeypatch.setattr(os, "preadv", held)
        monkeypatch.setattr(store, "_waited", counted_then_opened)
        ticket = store.prefetch(np.array([2]))
        assert not ticket.done and store.stats.waits == 0
        assert np.array_equal(ticket.wait(), want[[2]]) and store.stats.waits == 1
        assert np.array_equal(ticket.wait(), want[[2]]) and store.stats.waits == 1


def test_reads_are_in_flight_together(shard: tuple[Path, U8], monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight workers must be inside a read at once, or the barrier never opens."""
    path, want = shard
    together = threading.Barrier(8, timeout=60)
    real = os.preadv
    first = threading.local()

    def met(*args: Any) -> int:
        if not hasattr(first, "seen"):
            first.seen = True
            together.wait()
        return real(*args)

    with store_of(path, workers=8) as store:
        monkeypatch.setattr(os, "preadv", met)
        assert np.array_equal(store.read(np.arange(8)), want[:8])


def test_many_threads_share_a_store(shard: tuple[Path, U8]) -> None:
    path, want = shard
    wrong: list[int] = []
    with store_of(path, workers=3) as store:

        def use(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(20):
                rows = rng.integers(0, N_ROWS, 30)
                if not np.array_equal(store.read(rows), want[rows]):
                    wrong.append(seed)

        users = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert wrong == [] and store.stats.rows == 6 * 20 * 30


@pytest.mark.parametrize("name", ["oracle-a", "oracle-b", "oracle-e"])
def test_rows_of_a_checkpoint(name: str) -> None:
    path = DATA / name / "model.safetensors"
    with path.open("rb") as f:
        n = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(n))
    for layer in (1, 4):
        weight, scale = (header[f"layers.{layer}.engram.embed.{part}"] for part in ("weight", "scale"))
        n_rows, head_dim = weight["shape"]
        offsets = [8 + n + t["data_offsets"][0] for t in (weight, scale)]
        raw = path.read_bytes()
        rows = np.array([0, n_rows - 1, 17])
        with RowStore(path, offsets[0], offsets[1], n_rows, head_dim) as store:
            got = store.read(rows)
        for row, have in zip(rows.tolist(), got):
            codes = raw[offsets[0] + row * head_dim :][:head_dim]
            assert have.tobytes() == codes + raw[offsets[1] + row * (head_dim // 32) :][: head_dim // 32]


def test_rows_outside_the_table_are_refused(shard: tuple[Path, U8]) -> None:
    with store_of(shard[0]) as store:
        for rows in ([-1], [N_ROWS], [0, 2**40]):
            with pytest.raises(ValueError, match="asked of a table of 500"):
                store.prefetch(np.array(rows))


def test_a_shard_of_the_wrong_size_is_refused_by_name(shard: tuple[Path, U8], tmp_path: Path) -> None:
    path, _ = shard
    with pytest.raises(MissingTensorError, match=r"gone\.bin: engram shard is absent"):
        store_of(tmp_path / "gone.bin")
    with pytest.raises(FileFormatError, match="not a regular file"):
        store_of(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(FileFormatError, match=rf"shard\.bin: engram shard has {len(whole) - 1} bytes"):
        store_of(path)
    path.write_bytes(b"")
    with pytest.raises(FileFormatError, match="has 0 bytes"):
        store_of(path)
    for bad in ((-1, 0, 5, 32), (0, 0, 5, 33), (0, 0, -5, 32), (0, 0, 5, 0)):
        with pytest.raises(FileFormatError, match="impossible"):
            check_shard(DATA / "oracle-a" / "model.safetensors", *bad)


def test_a_safetensors_shard_must_have_the_size_its_header_says(tmp_path: Path) -> None:
    source = DATA / "oracle-a" / "model.safetensors"
    with safe_open(source, "np") as f:
        assert "layers.1.engram.embed.weight" in f.keys()  # noqa: SIM118, not a dict
    longer = tmp_path / "model.safetensors"
    longer.write_bytes(source.read_bytes() + b"\0")
    check_shard(source, 0, 0, 1, 32)
    with pytest.raises(FileFormatError, match="its own header says"):
        check_shard(longer, 0, 0, 1, 32)


def test_a_file_that_shrinks_or_fails_names_the_row(shard: tuple[Path, U8], monkeypatch: pytest.MonkeyPatch) -> None:
    path, want = shard
    for direct in direct_modes(path):
        path.write_bytes(b"\xff" * WEIGHT_OFFSET + want[:, :HEAD_DIM].tobytes() + b"\xff" * GAP + bytes(N_ROWS * 8))
        with store_of(path, direct=direct) as store:
            os.truncate(path, WEIGHT_OFFSET + 10 * HEAD_DIM + 5)
            with pytest.raises(FileFormatError, match=r"shard\.bin: the file ends inside engram row 10;"):
                store.read(np.array([10]))
            with pytest.raises(FileFormatError, match="row 400"):
                store.read(np.array([400]))
    path.write_bytes(b"\xff" * (SCALE_OFFSET + N_ROWS * 8))

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with store_of(path) as store:
        monkeypatch.setattr(os, "preadv", broken)
        ticket = store.prefetch(np.array([3]))
        for _ in range(2):
            with pytest.raises(Ds4Error, match=r"shard\.bin: reading engram row 3 failed: Input/output error"):
                ticket.wait()
        monkeypatch.undo()
        assert store.read(np.array([3])).shape == (1, 264)  # one failure does not end the store


def test_short_reads_are_continued(shard: tuple[Path, U8], monkeypatch: pytest.MonkeyPatch) -> None:
    path, want = shard
    real = os.preadv

    def few(fd: int, buffers: list[memoryview], at: int) -> int:
        return real(fd, [buffers[0][:100]], at)

    with store_of(path, direct=False) as store:
        monkeypatch.setattr(os, "preadv", few)
        assert np.array_equal(store.read(np.array([4, 5])), want[4:6])
        assert store.stats.reads == 2 * (3 + 1)


def test_without_o_direct_it_falls_back(shard: tuple[Path, U8], monkeypatch: pytest.MonkeyPatch) -> None:
    path, want = shard
    real = os.open

    def refusing(name: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    with store_of(path) as store:
        assert not store.direct and np.array_equal(store.read(np.array([4])), want[[4]])
    with pytest.raises(FileFormatError, match="has no O_DIRECT"):
        store_of(path, direct=True)


def test_closing(shard: tuple[Path, U8]) -> None:
    path, want = shard
    store = store_of(path, workers=2)
    ticket = store.prefetch(np.arange(300))
    store.close()
    store.close()
    assert np.array_equal(ticket.wait(), want[:300])  # what was asked for before is still read
    with pytest.raises(Ds4Error, match="the row store is closed"):
        store.prefetch(np.array([1]))
