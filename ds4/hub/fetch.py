"""One folder: plan, space, files, record. `ds4-fetch.json` in it is the record.

The plan stands in the record from its making on, with the commits that branches named then: a run that was
interrupted goes on with those very files, whatever was published since, and one that finds everything here asks
nobody. `update` plans anew; files whose sums are the same are not fetched again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ds4.disk import write_beside
from ds4.errors import CapacityError, FileFormatError, UsageError
from ds4.hub.names import RECORD, Piece, Wanted
from ds4.hub.part import FLUSH, Part, file_error, fits
from ds4.hub.plan import TOOL_FILES, Ask, Lister, Plan, make_plan
from ds4.model.tools import load_tool_text

FORMAT = 1
DAMAGED = "damaged"  # in the place of a file's sums, until it is replaced
RESERVE = 64 << 20  # bytes left free: records, and what others write meanwhile
Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # bytes here, bytes in all


class Hub(Lister, Protocol):
    """What is asked: `client.Hub`."""

    def stream(self, piece: Piece, start: int) -> Iterator[bytes]: ...


@dataclass
class Record:
    """What was planned for the folder, and which files of it were whole and checked when they got their names.

    Attributes:
        done: name -> the sums that it was checked by; others than the plan's: an older one, which is ours to replace.
    """

    ask: dict[str, Any]
    plan: Plan
    done: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> Record | None:
        """None: nothing was planned here.

        Raises:
            FileFormatError: it cannot be read.
        """
        path = folder / RECORD
        try:
            raw = json.loads(path.read_bytes())
            if raw["format"] != FORMAT:
                raise FileFormatError(f"{path}: is of format {raw['format']!r}; this version knows {FORMAT}")
            files = tuple(Wanted.from_json(row, str(path)) for row in raw["files"])
            plan = Plan(raw["base"], files, tuple(raw["sources"]))
            return Record(dict(raw["ask"]), plan, {str(k): list(v) for k, v in raw["done"].items()})
        except FileNotFoundError:
            return None
        except OSError as e:
            raise file_error(path, e) from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise FileFormatError(f"{path}: is no record of a fetch ({e!r}); remove it to begin anew") from e

    def write(self, folder: Path) -> None:
        """Raises CapacityError, Ds4Error: it cannot be written."""
        told = {
            "format": FORMAT, "ask": self.ask, "base": self.plan.base, "sources": list(self.plan.sources),
            "files": [w.to_json() for w in self.plan.files], "done": self.done,
        }  # fmt: skip
        try:
            write_beside(folder / RECORD, json.dumps(told, indent=1).encode())
        except OSError as e:
            raise file_error(folder / RECORD, e) from e


@dataclass(frozen=True)
class State:
    """What is here. `missing`: bytes still to come, without what a `.part` holds already."""

    plan: Plan
    here: frozenset[str]
    missing: int


class Fetch:
    """Everything that is done to one folder; the caller holds its lock.

    Args:
        hub: makes the hub, when it is needed.
        say: gets a line about whatever somebody may want to know.
        flush: bytes between two flushes.
    """

    def __init__(self, folder: Path, hub: Callable[[], Hub], say: Say, flush: int = FLUSH) -> None:
        self.folder, self._hub, self._say, self._flush = folder, hub, say, flush

    def look(self, ask: Ask | None, *, update: bool = False, verify: bool = False) -> State:
        """The plan and what is here of it, by names and sizes; nothing is fetched or changed.

        Args:
            ask: None: whatever the record says.
            verify: read every byte of what is here, and compare.

        Raises:
            UsageError: no record, and nothing asked.
            Ds4Error: as `client.Hub.listing` and `plan.make_plan`.
        """
        return self._state(self._record(ask, update), verify)

    def run(
        self, ask: Ask | None, *, update: bool = False, verify: bool = False, progress: Progress | None = None
    ) -> State:
        """Fetch what is missing.

        Raises:
            CapacityError: there is no room for it (nothing was fetched), or none is left.
            FileFormatError: what came does not fit; or a file of that name is somebody else's.
            Ds4Error: as `look`; or the hub gave up.
        """
        before = Record.read(self.folder)
        record = self._record(ask, update)
        if before is not None and before.plan != record.plan:
            self._leave(before, record)
        state = self._state(record, verify)
        missing = []
        for wanted in record.plan.files:
            if wanted.name not in state.here and not self._adopted(record, wanted):
                missing.append(wanted)
        if missing:
            if problem := room_problem(self.folder, sum(w.size - self._part(w).held for w in missing)):
                raise CapacityError(problem)
            record.write(self.folder)
            self._bring(record, missing, progress)
        elif record != before:
            record.write(self.folder)
        return self._state(record, verify=False)

    def _adopted(self, record: Record, wanted: Wanted) -> bool:
        """Whether a file that the record does not vouch for is the one, as after a kill just before the record.

        Raises:
            FileFormatError: it is another one, and not an older one of ours.
        """
        path, ours = self.folder / wanted.name, record.done.get(wanted.name)
        if not path.exists():
            record.done.pop(wanted.name, None)
            return False
        if ours == _marks(wanted):  # `_here` has just found it damaged
            record.done[wanted.name] = [DAMAGED]
        elif fits(wanted, path):
            self._say(f"{path}: was here already, and fits its sum")
            self._part(wanted).discard()
            record.done[wanted.name] = _marks(wanted)
            return True
        elif ours is None:
            raise FileFormatError(
                f"{path}: is there already and is not what {wanted.pieces[0].where} publishes; move it away, or "
                "fetch into another folder"
            )
        return False

    def _record(self, ask: Ask | None, update: bool) -> Record:
        before = Record.read(self.folder)
        if ask is None:
            if before is None:
                raise UsageError(
                    f"{self.folder}: nothing was fetched into it; name a repository: ds4 fetch OWNER/REPO"
                )
            if update:
                raise UsageError("--update needs the repository that is to be looked at anew")
            return before
        if before is not None and before.ask == ask.to_json() and not update:
            return before
        plan = make_plan(self._hub(), ask)
        record = Record(ask.to_json(), plan)
        if before is not None:  # files of the same names are ours to replace
            record.done = {w.name: before.done[w.name] for w in plan.files if w.name in before.done}
        return record

    def _leave(self, before: Record, record: Record) -> None:
        """What an earlier plan began and this one does not want is removed; what it finished stays."""
        wanted = {w.name: _marks(w) for w in record.plan.files}
        for old in before.plan.files:
            if wanted.get(old.name) != _marks(old):
                Part(old, self.folder, self._say).discard()
            if old.name not in wanted and (self.folder / old.name).exists():
                self._say(f"{self.folder / old.name}: is no longer among the files; remove it if nobody needs it")

    def _state(self, record: Record, verify: bool) -> State:
        here = {w.name for w in record.plan.files if self._here(record, w, verify)}
        missing = [w for w in record.plan.files if w.name not in here]
        return State(record.plan, frozenset(here), sum(w.size - self._part(w).held for w in missing))

    def _here(self, record: Record, wanted: Wanted, verify: bool) -> bool:
        if record.done.get(wanted.name) != _marks(wanted):
            return False
        path = self.folder / wanted.name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size != wanted.size:
            now = "is gone" if size is None else f"has {size:,} bytes, published are {wanted.size:,}"
            self._say(f"{path}: {now}; it has to be fetched again")
            return False
        if verify and not fits(wanted, path):
            self._say(f"{path}: no longer fits its published sum; it has to be fetched again")
            return False
        return True

    def _bring(self, record: Record, missing: list[Wanted], progress: Progress | None) -> None:
        hub, total = self._hub(), record.plan.size
        before = total - sum(w.size for w in missing)
        for wanted in missing:
            step = (lambda at, base=before: progress(base + at, total)) if progress else None
            self._part(wanted).complete(hub, step)
            record.done[wanted.name] = _marks(wanted)
            record.write(self.folder)
            before += wanted.size
            self._say(f"{wanted.name}: {wanted.size:,} bytes, {wanted.checked_by}")

    def _part(self, wanted: Wanted) -> Part:
        return Part(wanted, self.folder, self._say, self._flush)


def room_problem(folder: Path, need: int) -> str | None:
    """Why so many bytes more would not fit; None: they do."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free >= need + RESERVE:
        return None
    return (
        f"{there}: {free / 1e9:.2f} GB are free, {(need + RESERVE) / 1e9:.2f} GB are needed; free some, or fetch "
        "into a folder on another disk"
    )


def sidecars(plan: Plan) -> dict[str, str]:
    """Folders with layer files among the files: last part of the name -> the folder."""
    folders = {w.name.rpartition("/")[0] for w in plan.files if w.name.endswith(".bin")}
    return {folder.rpartition("/")[2]: folder for folder in sorted(folders) if folder}


def tool_text_problem(folder: Path, plan: Plan) -> str | None:
    """Why a server of this folder would put its own words around tools; None: it has the released ones."""
    if load_tool_text(folder) is not None:
        return None
    came = [w.name for w in plan.files if w.name in TOOL_FILES]
    why = f"{', '.join(came)} came, without them" if came else f"no {TOOL_FILES[0]} came"
    return (
        f"the released words around tools are not in {folder} ({why}): a server will use its own, which the model "
        "was not trained with"
    )


def _marks(wanted: Wanted) -> list[str]:
    """The sums that a file has to fit."""
    return [str(p.sum) for p in wanted.pieces] + ([str(wanted.sum)] if wanted.sum else [])
