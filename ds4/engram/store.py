"""Engram rows straight from the shard on disk: read ahead, many reads in flight, nothing cached.

A row is `head_dim` bytes of codes and `head_dim / 32` bytes of scales, in two places of one file. A token needs
a few dozen rows at random places of a table of 100 GB, so what counts is how many reads are under way at once:
worker threads with one `pread` each (the interpreter lock is released while they wait). Where the file system
allows it the page cache is bypassed (O_DIRECT, whole aligned blocks into aligned buffers), else the kernel is
told not to read ahead. Refused at open: a file that is absent, too short, or not the size its own header says.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ds4.errors import Ds4Error, FileFormatError, MissingTensorError

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

SCALE_BLOCK = 32  # columns that share one scale byte
BLOCK_BYTES = 4096  # O_DIRECT alignment; every common device's logical block divides it
DEFAULT_WORKERS = 32  # reads in flight; an SSD reaches its rate at about this depth
ROWS_A_JOB = 64  # a prefill's thousands of rows are dealt out in pieces of at most this many
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class StoreStats:
    """What a store did since it was opened.

    Attributes:
        rows: rows asked for, repeats within one batch included.
        reads: system calls that returned data.
        bytes: bytes those calls returned; whole blocks under O_DIRECT.
        waits: tickets that were waited for before they were done: read ahead too late.
    """

    rows: int = 0
    reads: int = 0
    bytes: int = 0
    waits: int = 0


def check_shard(path: str | Path, weight_offset: int, scale_offset: int, n_rows: int, head_dim: int) -> None:
    """Refuse a shard that cannot hold the table, before anything is read from it.

    If the file opens with a safetensors header, its size must be exactly what that header says.

    Raises:
        MissingTensorError: no such file.
        FileFormatError: not a regular file, or of the wrong size.
    """
    p = Path(path)
    try:
        size = p.stat().st_size
    except FileNotFoundError:
        raise MissingTensorError(
            f"{p}: engram shard is absent; put it beside the base or name --engram-dir"
        ) from None
    except OSError as e:
        raise FileFormatError(f"{p}: engram shard cannot be read ({e.strerror or e})") from e
    if not p.is_file():
        raise FileFormatError(f"{p}: engram shard is not a regular file")
    if head_dim <= 0 or head_dim % SCALE_BLOCK or n_rows < 0 or min(weight_offset, scale_offset) < 0:
        raise FileFormatError(
            f"{p}: an engram table of {n_rows} rows of {head_dim} at {weight_offset} and {scale_offset} is "
            f"impossible; rows are a multiple of {SCALE_BLOCK} wide"
        )
    end = max(weight_offset + n_rows * head_dim, scale_offset + n_rows * (head_dim // SCALE_BLOCK))
    if size < end:
        raise FileFormatError(f"{p}: engram shard has {size} bytes, its table of {n_rows} rows ends at {end}")
    told = _header_size(p, size)
    if told is not None and told != size:
        raise FileFormatError(f"{p}: engram shard has {size} bytes, its own header says {told}")


def _header_size(path: Path, size: int) -> int | None:
    """The file size that a safetensors header implies; None if the file has no such header."""
    try:
        with path.open("rb") as f:
            n = int.from_bytes(f.read(8), "little")
            if not 2 <= n <= min(size - 8, _MAX_HEADER_BYTES):
                return None
            header = json.loads(f.read(n))
        ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
        return 8 + n + max(ends, default=0) if all(type(e) is int for e in ends) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None


class Ticket:
    """Rows that are on their way."""

    def __init__(self, store: RowStore, rows: U8, order: I64 | None, jobs: int) -> None:
        self._store = store
        self._rows = rows
        self._order = order
        self._left = jobs
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: Ds4Error | None = None
        if jobs == 0:
            self._done.set()

    @property
    def done(self) -> bool:
        """True once `wait` would return (or raise) at once."""
        return self._done.is_set()

    def wait(self) -> U8:
        """The rows, u8 [n, head_dim + head_dim/32]: codes, then scales. May be called again.

        Raises:
            FileFormatError: the file ended inside a row.
            Ds4Error: the read failed, or the store was closed before it happened. Both name file and row.
        """
        if not self._done.is_set():
            self._store._waited()
            self._done.wait()
        if self._error is not None:
            raise self._error
        return self._rows if self._order is None else self._rows[self._order]

    def _finish_job(self, error: Ds4Error | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left == 0:
                self._done.set()


@dataclass(frozen=True)
class _Job:
    ticket: Ticket
    rows: list[int]
    out: U8  # [len(rows), head_dim + head_dim/32], a view of the ticket's rows


class RowStore:
    """One table of one shard. Safe to use from several threads; close it, or use it as a context manager."""

    def __init__(
        self,
        path: str | Path,
        weight_offset: int,
        scale_offset: int,
        n_rows: int,
        head_dim: int,
        *,
        workers: int = DEFAULT_WORKERS,
        direct: bool | None = None,
    ) -> None:
        """Open the shard and start the workers.

        Args:
            weight_offset, scale_offset: absolute byte offsets in the file.
            workers: reads in flight.
            direct: True or False forces O_DIRECT on or off; None takes it where it works.

        Raises:
            MissingTensorError, FileFormatError: as `check_shard`; or O_DIRECT was demanded and does not work.
        """
        self.path = Path(path)
        check_shard(self.path, weight_offset, scale_offset, n_rows, head_dim)
        self.n_rows, self.head_dim = n_rows, head_dim
        self.row_bytes = head_dim + head_dim // SCALE_BLOCK
        self._places = ((weight_offset, head_dim), (scale_offset, head_dim // SCALE_BLOCK))
        self._fd, self.direct = _open(self.path, direct)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"engram-{self.path.name}-{i}", daemon=True)
            for i in range(max(workers, 1))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            return self._stats

    def read(self, rows: I64) -> U8:
        """Rows now: `prefetch(rows).wait()`, not counted as a late wait."""
        ticket = self.prefetch(rows)
        ticket._done.wait()
        return ticket.wait()

    def prefetch(self, rows: I64) -> Ticket:
        """Begin to read rows; returns at once.

        Args:
            rows: integer [n], each in [0, n_rows). Repeats are read once.

        Raises:
            ValueError: a row outside the table: the hash and the table do not belong together.
            Ds4Error: the store is closed.
        """
        wanted = np.asarray(rows, np.int64).reshape(-1)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.n_rows):
            raise ValueError(f"{self.path}: rows {wanted.min()}..{wanted.max()} asked of a table of {self.n_rows}")
        unique, order = np.unique(wanted, return_inverse=True)
        out = np.empty((len(unique), self.row_bytes), np.uint8)
        per_job = min(max(-(-len(unique) // len(self._threads)), 1), ROWS_A_JOB)
        starts = range(0, len(unique), per_job)
        ticket = Ticket(self, out, None if np.array_equal(unique, wanted) else order.reshape(-1), len(starts))
        with self._lock:  # close() takes it too: no job gets into the queue behind the workers' end
            if self._closed:
                raise Ds4Error(f"{self.path}: the row store is closed")
            self._stats = replace(self._stats, rows=self._stats.rows + wanted.size)
            for i in starts:
                self._jobs.put(_Job(ticket, unique[i : i + per_job].tolist(), out[i : i + per_job]))
        return ticket

    def close(self) -> None:
        """Let the reads under way finish, then close the file. Again is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._fd)

    def __enter__(self) -> RowStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def _waited(self) -> None:
        with self._lock:
            self._stats = replace(self._stats, waits=self._stats.waits + 1)

    def _work(self) -> None:
        longest = max(n for _, n in self._places)
        buffer = mmap.mmap(-1, _span(BLOCK_BYTES - 1, longest)[1])  # anonymous pages are aligned
        view = memoryview(buffer)
        while (job := self._jobs.get()) is not None:
            error: Ds4Error | None = None
            reads = n_bytes = 0
            try:
                for row, target in zip(job.rows, job.out):
                    column = 0
                    for offset, n in self._places:
                        got, calls = self._read_at(row, offset + row * n, n, view)
                        target[column : column + n] = np.frombuffer(view, np.uint8, n, got[0])
                        column, reads, n_bytes = column + n, reads + calls, n_bytes + got[1]
            except Ds4Error as e:
                error = e
            except Exception as e:  # a worker must not die with its ticket unfinished
                error = Ds4Error(f"{self.path}: reading engram rows failed: {e!r}")
            with self._lock:
                s = self._stats
                self._stats = replace(s, reads=s.reads + reads, bytes=s.bytes + n_bytes)
            job.ticket._finish_job(error)

    def _read_at(self, row: int, at: int, n: int, view: memoryview) -> tuple[tuple[int, int], int]:
        """Bytes [at, at + n) into `view`: ((where they begin in it, bytes read), system calls)."""
        begin, span = _span(at, n) if self.direct else (at, n)
        skip, filled, calls = at - begin, 0, 0
        while filled < skip + n:
            try:
                got = os.preadv(self._fd, [view[filled:span]], begin + filled)
            except OSError as e:
                raise Ds4Error(f"{self.path}: reading engram row {row} failed: {e.strerror or e}") from e
            calls += 1
            filled += got
            # under O_DIRECT a read that stops inside a block has met the end of the file
            if got == 0 or (self.direct and filled % BLOCK_BYTES and filled < skip + n):
                raise FileFormatError(f"{self.path}: the file ends inside engram row {row}; was it cut or replaced?")
        return (skip, filled), calls


def _span(at: int, n: int) -> tuple[int, int]:
    """The whole blocks around bytes [at, at + n): first byte and length."""
    begin = at // BLOCK_BYTES * BLOCK_BYTES
    return begin, -(-(at + n) // BLOCK_BYTES) * BLOCK_BYTES - begin


def _open(path: Path, direct: bool | None) -> tuple[int, bool]:
    """A file descriptor, and whether it bypasses the page cache."""
    flag = getattr(os, "O_DIRECT", 0)
    if direct is not False and flag and _direct_works(path, flag):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag), True
    if direct:
        raise FileFormatError(f"{path}: this file system has no O_DIRECT")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, False


def _direct_works(path: Path, flag: int) -> bool:
    """Whether one aligned block can be read that way: some file systems take the flag and refuse the read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
    except OSError:
        return False
    try:
        os.preadv(fd, [mmap.mmap(-1, BLOCK_BYTES)], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
