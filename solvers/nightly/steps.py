"""A night under way: work/DAY/, where each finished step lies as a file of its own.

    job.json            what is solved, from what (`head`); another head begins anew
    steps/NN-NAME.json  {"step", "result", "seconds"}, written beside, forced to the disk, renamed
    candidates/, ...    what solves make; they go on after a kill by themselves

A killed night goes on at its first step without a file. Results are JSON; floats come back bit for bit.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds4.disk import sync_folder
from ds4.errors import FileFormatError
from ds4.posttrain.log import replace_file
from solvers.nightly.home import JOB, errors

Say = Callable[[str], None]


class Steps:
    """The steps of one job.

    Attributes:
        seconds: of each finished step, in order; a resumed one's are those of the run that finished it.
        resumed: steps that an earlier run had finished.
    """

    def __init__(self, folder: Path, head: Mapping[str, Any], say: Say) -> None:
        """Take up what an earlier run of the same job left, or begin.

        Raises:
            CapacityError: the disk is full.
        """
        self.folder, self.seconds, self.resumed = folder, dict[str, float](), 0
        self._say, self._files = say, folder / "steps"
        wanted = json.loads(json.dumps(head))
        if self._head() != wanted:
            with errors(folder):
                if folder.exists():
                    shutil.rmtree(folder)
                folder.mkdir(mode=0o700)
                sync_folder(folder.parent)
            replace_file(folder / JOB, _text(wanted))
        with errors(folder):
            self._files.mkdir(mode=0o700, exist_ok=True)

    def _head(self) -> object:
        try:
            return json.loads((self.folder / JOB).read_bytes())
        except (OSError, ValueError):
            return None

    def do(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of a step: an earlier run's, or `work`'s, kept before this returns."""
        path = self._files / f"{len(self.seconds) + 1:02d}-{re.sub('[^A-Za-z0-9]+', '-', name)}.json"
        if path.exists():
            try:
                found = json.loads(path.read_bytes())
                if found["step"] != name:
                    raise ValueError(f"is of {found['step']!r}")
                result, self.seconds[name] = found["result"], float(found["seconds"])
            except (OSError, ValueError, KeyError, TypeError) as e:
                raise FileFormatError(f"{path}: is no step of this night ({e}); remove {self.folder}") from e
            self.resumed += 1
            return result
        self._say(f"{name} ...")
        begun = time.monotonic()
        result = json.loads(json.dumps(work()))
        took = time.monotonic() - begun
        replace_file(path, _text({"step": name, "result": result, "seconds": round(took, 3)}))
        self.seconds[name] = round(took, 3)
        return result

    def folder_of(self, *parts: str) -> Path:
        """A folder in this night's, its parents made."""
        path = self.folder.joinpath(*parts)
        with errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def remove(self) -> None:
        """The night is over. The head goes first: what a kill leaves is no job any more."""
        with errors(self.folder):
            (self.folder / JOB).unlink(missing_ok=True)
            shutil.rmtree(self.folder)
            sync_folder(self.folder.parent)


def _text(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
