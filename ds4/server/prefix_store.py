"""Where kept texts are: in memory, in files, or on their way there; what goes when there is no room.

Memory and disk have a size each; what was used longest ago goes first. Files are written by a thread with a short
list: a text that finds it full is not written, and so a slow or full disk delays no answer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds4.engine.keep import Saved
from ds4.engine.keep_file import KeepError
from ds4.server.prefix_folder import DiskFull, Found, PrefixFolder, remove
from ds4.server.prefix_index import Candidate, Entry, PrefixIndex, chain_of

MOST_WRITING = 2  # texts that wait for the disk; more are not written
CLOSE_S = 10.0  # that the last file gets

log = logging.getLogger("ds4.server")


@dataclass
class PrefixStats:
    """What became of prompts and texts since the server began; bytes and entries as they are now.

    Attributes:
        lookups, hits, disk_hits: prompts; those that went on from a text; of these, from one that only a file had.
        asked_tokens, reused_tokens: of prompts, and how many of them were not run again.
        stored, written: texts that were kept in memory, and in files.
        evicted, evicted_files: that went because others were used later.
        refused: texts that were not used or not kept, by reason: of a file "unreadable", "version", "truncated",
            "broken", "foreign" (another model's), "other_text" (its blocks' hashes are a prompt's, its tokens are
            not); of a text "unfit" (a session did not take it), "too_large", "busy" (the disk was too slow),
            "disk_full", "disk_failed", "memory".
    """

    lookups: int = 0
    hits: int = 0
    disk_hits: int = 0
    asked_tokens: int = 0
    reused_tokens: int = 0
    stored: int = 0
    written: int = 0
    evicted: int = 0
    evicted_files: int = 0
    memory_bytes: int = 0
    memory_entries: int = 0
    disk_bytes: int = 0
    disk_entries: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class PrefixStore:
    """Kept texts. `add` and `text` are for one thread, the rest for any.

    Args:
        memory_bytes: of states in memory.
        folder: where they are written; None: nowhere.
    """

    def __init__(self, memory_bytes: int, folder: PrefixFolder | None) -> None:
        self._most, self._folder = memory_bytes, folder
        self._lock = threading.RLock()
        self._index = PrefixIndex()
        self._stats = PrefixStats()
        self._disk_well = True
        self._list: queue.Queue[tuple[Entry, Saved, Entry | None] | None] = queue.Queue(MOST_WRITING)
        self._writer: threading.Thread | None = None
        if folder is not None:
            for found in folder.scan():
                self._found(found)
            self._fit_disk(0)
            self._writer = threading.Thread(target=self._write_all, name="ds4-prefixes", daemon=True)
            self._writer.start()

    @property
    def stats(self) -> PrefixStats:
        """A copy."""
        with self._lock:
            self._count()
            return PrefixStats(**{**vars(self._stats), "refused": Counter(self._stats.refused)})

    def _count(self) -> None:
        held = [e.nbytes for e in self._index.entries() if e.saved is not None]
        files = [e.file_bytes for e in self._index.entries() if e.path is not None]
        s = self._stats
        s.memory_bytes, s.memory_entries = sum(held), len(held)
        s.disk_bytes, s.disk_entries = sum(files), len(files)

    def asked(self, chain: bytes, tokens: int) -> int:
        """A prompt is looked up; how many of its tokens some text shares, in whole blocks."""
        with self._lock:
            self._stats.lookups += 1
            self._stats.asked_tokens += tokens
            return self._index.shared(chain)

    def served(self, entry: Entry, tokens: int, on_disk: bool) -> None:
        """A prompt goes on from it."""
        with self._lock:
            entry.used = time.time_ns()
            self._stats.hits += 1
            self._stats.disk_hits += on_disk
            self._stats.reused_tokens += tokens

    def find(self, chain: bytes, identity: str) -> list[Sequence[Candidate]]:
        """See PrefixIndex.find."""
        with self._lock:
            return list(self._index.find(chain, identity))

    def foreign(self, identity: str) -> None:
        """Count the texts that are not this model's, and say so."""
        with self._lock:
            others = sum(bool(e.marks) and e.identity != identity for e in self._index.entries())
            self._stats.refused["foreign"] += others
        if others:
            log.info("%d kept texts belong to another model, or to other options: they are not used", others)

    def text(self, entry: Entry) -> Saved | None:
        """The text; from its file if need be, and then into memory if it fits there. None: it cannot be used."""
        if entry.saved is not None:
            return entry.saved
        folder, path = self._folder, entry.path
        if folder is None or path is None:
            return None
        try:
            header, saved = folder.read(path)
            if (header.identity, header.chain) != (entry.identity, entry.chain) or (
                chain_of(saved.tokens, header.identity) != header.chain or saved.marks != entry.marks
            ):
                raise KeepError(path, "broken", "is not the text that was written there")
        except KeepError as e:
            with self._lock:
                if entry.path != path:  # it went to make room, this moment
                    return None
            self.drop(entry, e.reason, str(e), unlink=e.useless)
            return None
        except MemoryError:
            self.refuse("memory", f"{path}: no memory for its {entry.file_bytes >> 20} MB")
            return None
        with self._lock:
            self._hold(entry, saved)
        return saved

    def drop(self, entry: Entry, reason: str, why: str, *, unlink: bool = True) -> None:
        """Nobody is offered it again, and its file goes."""
        self.refuse(reason, why)
        with self._lock:
            path, entry.path, entry.saved = entry.path, None, None
            self._index.remove(entry)
        if path is not None and unlink:
            remove(path)

    def add(
        self, entry: Entry, saved: Saved, before: Sequence[Entry], *, write: bool, replaced: Entry | None
    ) -> bool:
        """A new text. `before`: of shorter ones that it has all of, which go from memory; `replaced`: the one of
        these that may have a file. `write`: it is to have one, in place of that. False: there is no room for it.
        """
        room = self._most if self._folder is None else max(self._most, self._folder.most_bytes)
        write = write and self._folder is not None
        with self._lock:
            entry.writing = write  # found again in a file, if it is too large for memory
            self._index.add(entry)
            if saved.nbytes <= self._most:
                for old in before:
                    self._let_go(old)  # its file goes when there is a new one
            self._stats.stored += self._hold(entry, saved)
            if entry.saved is None and not write:
                self._index.remove(entry)
        if write:
            self.write(entry, saved, replaced)
        return saved.nbytes <= room

    def outdated(self, entry: Entry) -> None:
        """Out of memory: a longer one is about to be added."""
        with self._lock:
            self._let_go(entry)

    def write(self, entry: Entry, saved: Saved, replaced: Entry | None) -> None:
        """Have a text written, unless it has a file; see `add`."""
        if self._folder is None or entry.path is not None:
            return
        with self._lock:
            entry.writing = False
            if saved.nbytes > self._folder.most_bytes:
                self.refuse("too_large", f"{len(saved.tokens)} tokens take {saved.nbytes >> 20} MB", told=False)
            else:
                try:
                    self._list.put_nowait((entry, saved, replaced))
                    entry.writing = True
                except queue.Full:
                    self.refuse("busy", "the disk is too slow for kept texts", told=False)
            if entry.saved is None and not entry.writing:
                self._index.remove(entry)

    def forget(self) -> None:
        """Nothing is in memory any more; files stay."""
        with self._lock:
            for entry in self._index.entries():
                self._let_go(entry)

    def flush(self) -> None:
        """Wait until what was to be written is."""
        self._list.join()

    def close(self) -> None:
        """Write what waits, and leave the folder to others."""
        self.forget()
        if self._writer is not None:
            with contextlib.suppress(queue.Full):  # a disk that hangs: the thread is a daemon
                self._list.put(None, timeout=CLOSE_S)
            self._writer.join(CLOSE_S)
            self._writer = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    # ---- memory ----

    def _hold(self, entry: Entry, saved: Saved) -> bool:
        """In memory, others going for it; False if it alone is too large. Under the lock."""
        entry.used = time.time_ns()
        if saved.nbytes > self._most:
            self.refuse(
                "too_large", f"a text of {len(saved.tokens)} tokens takes {saved.nbytes >> 20} MB", told=False
            )
            return False
        entry.saved, entry.nbytes = saved, saved.nbytes
        held = sorted((e for e in self._index.entries() if e.saved is not None), key=lambda e: e.used)
        total = sum(e.nbytes for e in held)
        for old in held:
            if total <= self._most:
                break
            if old is not entry:
                total -= old.nbytes
                self._stats.evicted += 1
                self._let_go(old)
        return True

    def _let_go(self, entry: Entry) -> None:
        """Out of memory; found no longer if no file has it. Under the lock."""
        entry.saved = None
        if entry.path is None and not entry.writing:
            self._index.remove(entry)

    # ---- files ----

    def _found(self, found: Found) -> None:
        """A file that was there when the server began."""
        entry = Entry("", b"", (), path=found.path, file_bytes=found.file_bytes, used=found.used)
        if found.header is not None:
            entry.identity, entry.chain, entry.marks = found.header.identity, found.header.chain, found.header.marks
        if found.problem is not None:
            self.refuse(found.problem.reason, str(found.problem))
            if found.problem.useless:
                remove(found.path)
                return
        self._index.add(entry)

    def _write_all(self) -> None:
        """The writer's thread."""
        while (work := self._list.get()) is not None:
            try:
                self._write_one(*work)
            except Exception:
                log.exception("writing a kept text failed")
            finally:
                self._list.task_done()
        self._list.task_done()

    def _write_one(self, entry: Entry, saved: Saved, replaced: Entry | None) -> None:
        folder = self._folder
        if folder is None:
            return
        if replaced is not None:  # first: the folder need not hold both, and it is no loss if the new one fails
            with self._lock:
                old, replaced.path = replaced.path, None
                self._let_go(replaced)
            if old is not None:
                remove(old)
        self._fit_disk(saved.nbytes)
        path = None
        try:
            path, size = folder.write(saved, entry.identity, entry.chain)
        except OSError as e:
            full = isinstance(e, DiskFull) or e.errno in (errno.ENOSPC, errno.EDQUOT)
            problem = str(e) if isinstance(e, DiskFull) else (e.strerror or str(e))
            self.refuse(
                "disk_full" if full else "disk_failed", f"{folder.path}: a text is not written: {problem}",
                told=self._disk_well,
            )  # fmt: skip
        self._disk_well = path is not None
        with self._lock:
            entry.writing = False
            if path is None:
                if entry.saved is None:
                    self._index.remove(entry)
                return
            if entry not in self._index:  # nobody wants it any more
                remove(path)
                return
            self._stats.written += 1
            entry.path, entry.file_bytes = path, size
        self._fit_disk(0)  # a file is a little longer than its text

    def _fit_disk(self, coming: int) -> None:
        """Files go, the one that was used longest ago first, until there is room for so many bytes."""
        if self._folder is None:
            return
        with self._lock:
            files = sorted((e for e in self._index.entries() if e.path is not None), key=lambda e: e.used)
            total = coming + sum(e.file_bytes for e in files)
            for entry in files:
                if total <= self._folder.most_bytes:
                    break
                total -= entry.file_bytes
                self._stats.evicted_files += 1
                if entry.path is not None:
                    remove(entry.path)
                entry.path = None
                if entry.saved is None:
                    self._index.remove(entry)

    def refuse(self, reason: str, why: str, *, told: bool = True) -> None:
        """Count it, and say it in a line."""
        with self._lock:
            self._stats.refused[reason] += 1
        if told:
            log.warning("warning: %s", why)
