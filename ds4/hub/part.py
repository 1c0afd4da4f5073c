"""NAME.part: a file that is on its way. It gets its name when every byte of it is here and fits the published sums.

Beside it NAME.part.json says which file it is to become, how many of its pieces are whole and checked, and up to
which byte it was flushed to disk. Another run goes on from there: what lies behind that byte, or belongs to another
file, is cut off. A file published in pieces grows in place, piece by piece, so it never needs its space twice.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from ds4.disk import sync_folder, write_beside
from ds4.errors import CapacityError, Ds4Error, FileFormatError
from ds4.hub.names import NOTE, PART, Hasher, Piece, Wanted

FLUSH = 64 << 20  # bytes after which what is here is made to last: what a kill costs at most
BLOCK = 4 << 20
TAKES = 2  # of a piece whose sum does not fit
Progress = Callable[[int], None]  # bytes of the file that are here


class Source(Protocol):
    """Where bytes come from: `client.Hub`."""

    def stream(self, piece: Piece, start: int) -> Iterator[bytes]: ...


class Part:
    """The unfinished file of `wanted` in `folder`. Nobody else writes there meanwhile (the caller has the lock).

    Args:
        say: gets a line about whatever has to be fetched again.
    """

    def __init__(self, wanted: Wanted, folder: Path, say: Callable[[str], None], flush: int = FLUSH) -> None:
        self.target = folder / wanted.name
        self.path = self.target.with_name(self.target.name + PART)
        self._note = self.target.with_name(self.target.name + NOTE)
        self._wanted, self._say, self._flush = wanted, say, flush
        self._whole = self._flushed = 0  # pieces; bytes

    @property
    def held(self) -> int:
        """Bytes of it that are here, as a run would find them; what they take is no longer needed."""
        _, flushed = self._read_note()
        try:
            return min(flushed, self.path.stat().st_size)
        except OSError:
            return 0

    def complete(self, source: Source, progress: Progress | None = None) -> None:
        """Fetch what is missing and give the file its name.

        Raises:
            FileFormatError: a piece came twice with another sum than the published one.
            CapacityError: the disk is full. What is here stays, then and after every other error.
            Ds4Error: the source gave up, or the folder cannot be written.
        """
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            with os.fdopen(handle, "r+b", buffering=0) as f:
                self._resume(f)
                try:
                    self._fill(f, source, progress)
                finally:
                    self._keep(f)
                self._check_whole(f)
            os.replace(self.path, self.target)
            sync_folder(self.target.parent)
            self._note.unlink(missing_ok=True)
        except OSError as e:
            raise file_error(self.path, e) from e

    def discard(self) -> None:
        """Remove it."""
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def _resume(self, f: BinaryIO) -> None:
        self._whole, self._flushed = self._read_note()
        size = os.fstat(f.fileno()).st_size
        if size and not self._flushed:
            self._say(f"{self.path}: nothing says what it is a part of; begun again")
        if size < self._flushed:  # cut by somebody else: pieces behind the cut are gone
            self._flushed = size
            while self._end_of(self._whole) > size:
                self._whole -= 1
        f.truncate(self._flushed)

    def _fill(self, f: BinaryIO, source: Source, progress: Progress | None) -> None:
        begin = self._end_of(self._whole)
        for piece in self._wanted.pieces[self._whole :]:
            for take in range(1, TAKES + 1):
                hasher = self._append(f, piece, begin, source, progress)
                if hasher.hexdigest() == piece.sum.digits:
                    break
                again = "fetching it again" if take < TAKES else "try another --endpoint, or --no-xet"
                what = f"{piece.where}: came with {piece.sum.kind}:{hasher.hexdigest()}, published is {piece.sum}"
                f.truncate(begin)
                self._keep(f)
                if take == TAKES:
                    raise FileFormatError(f"{what}, {TAKES} times; {again}")
                self._say(f"{what}; {again}")
            begin += piece.size
            self._whole += 1
            self._keep(f)

    def _append(self, f: BinaryIO, piece: Piece, begin: int, source: Source, progress: Progress | None) -> Hasher:
        """Bring a piece to its end; its hash, for which what is here of it already is read back."""
        hasher = piece.sum.hasher(piece.size)
        f.seek(begin)
        at = begin
        while block := f.read(BLOCK):
            hasher.update(block)
            at += len(block)
        if progress:
            progress(at)
        for block in source.stream(piece, at - begin):
            _write(f, block)
            hasher.update(block)
            at += len(block)
            if at - self._flushed >= self._flush:
                self._keep(f)
            if progress:
                progress(at)
        if at != begin + piece.size:
            raise Ds4Error(f"{piece.where}: {at - begin} bytes came, {piece.size} are published")
        return hasher

    def _check_whole(self, f: BinaryIO) -> None:
        """Several pieces, each of which fits, need not be the file that somebody published in them."""
        want = self._wanted
        if want.sum is None or (len(want.pieces) == 1 and want.sum == want.pieces[0].sum):
            return
        found = file_sum(f, want.sum.hasher(want.size))
        if found != want.sum.digits:
            self.discard()
            raise FileFormatError(
                f"{self.target}: its {len(want.pieces)} pieces fit their sums, and together have "
                f"{want.sum.kind}:{found}; published is {want.sum}. The publication contradicts itself: tell "
                "whoever made it"
            )

    def _end_of(self, pieces: int) -> int:
        return sum(p.size for p in self._wanted.pieces[:pieces])

    def _keep(self, f: BinaryIO) -> None:
        """Flush, then note it: never the other way round."""
        size = os.fstat(f.fileno()).st_size
        os.fsync(f.fileno())
        self._flushed = size
        note = {"wanted": self._mark(), "whole": self._whole, "flushed": size}
        write_beside(self._note, json.dumps(note).encode())

    def _read_note(self) -> tuple[int, int]:
        """Pieces that are whole, and bytes flushed; zeros where the note says nothing about this very file."""
        try:
            note = json.loads(self._note.read_bytes())
            whole, flushed = note["whole"], note["flushed"]
            ours = note["wanted"] == self._mark() and 0 <= whole <= len(self._wanted.pieces)
            within = self._end_of(whole) <= flushed <= self._end_of(whole + 1)
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0
        return (whole, flushed) if ours and within else (0, 0)

    def _mark(self) -> list[str]:
        """What makes it the same file: what its pieces are, wherever they come from."""
        return [f"{p.size} {p.sum}" for p in self._wanted.pieces]


def file_sum(f: BinaryIO, hasher: Hasher) -> str:
    """Hex digits of an open file's bytes."""
    f.seek(0)
    while block := f.read(BLOCK):
        hasher.update(block)
    return hasher.hexdigest()


def fits(wanted: Wanted, path: Path, progress: Progress | None = None) -> bool:
    """Whether the file at `path` has the published bytes, every one of them read.

    Raises:
        Ds4Error: it cannot be read.
    """
    try:
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size != wanted.size:
                return False
            whole = wanted.sum.hasher(wanted.size) if wanted.sum else None
            at = 0
            for piece in wanted.pieces:
                hasher, end = piece.sum.hasher(piece.size), at + piece.size
                while at < end and (block := f.read(min(BLOCK, end - at))):
                    hasher.update(block)
                    if whole:
                        whole.update(block)
                    at += len(block)
                    if progress:
                        progress(at)
                if hasher.hexdigest() != piece.sum.digits:
                    return False
            return whole is None or wanted.sum is None or whole.hexdigest() == wanted.sum.digits
    except OSError as e:
        raise file_error(path, e) from e


def _write(f: BinaryIO, block: bytes) -> None:
    view = memoryview(block)
    while view:  # an unbuffered write may take a part
        view = view[f.write(view) :]


def file_error(path: Path, e: OSError) -> Ds4Error:
    """An operating system's refusal, with what to do."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CapacityError(
            f"{path}: {e.strerror}; free some space and run the same command again: it goes on where it stopped"
        )
    return Ds4Error(f"{e.filename or path}: {e.strerror or e}; choose a folder that can be written")
