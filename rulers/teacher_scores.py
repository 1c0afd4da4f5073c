"""The original's logits of a text, computed once and kept.

A cache is a folder of scores files (scores.py), one a model, weights, text, window length and arithmetic, under a
name made of those. A file that is there is used; one that is missing is computed by a walk (ds4/teacher/walk.py),
which reads each weight once for all windows, and which a killed run takes up at the layer or window that it was in.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from ds4.errors import CapacityError, FileFormatError, UsageError
from ds4.teacher.run import Teacher
from ds4.teacher.source import open_source
from ds4.teacher.tasks import Helpers
from ds4.teacher.walk import Walk
from ds4.work.tasks import Crew
from rulers.identity import file_mark, model_fingerprint
from rulers.scores import Meta, Scores, ScoresWriter
from rulers.text import Text

Progress = Callable[[int, int], None]  # steps done, steps in all: a layer is one, a window's logits are one


def weights_mark(path: str | Path) -> str:
    """Eight hex digits that tell the weights of a checkpoint folder, or of a base file, from others of their shape.

    Raises:
        FileFormatError: a file cannot be read.
    """
    p = Path(path)
    if not p.is_dir():
        return file_mark(p)
    h = hashlib.sha256()
    for file in sorted(p.glob("*.safetensors")):
        h.update(f"{file.name} {file_mark(file)}\n".encode())
    return h.hexdigest()[:8]


def teacher_scores(
    checkpoint: str | Path,
    text: Text,
    *,
    domain: str,
    split: str,
    length: int,
    arith: str = "none",
    folder: str | Path,
    say: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    crew: Crew | None = None,
) -> Scores:
    """The original's scores of a text, from the cache in `folder` or computed into it.

    Args:
        checkpoint: a folder in the released layout.
        domain, split, length: where the text is from, see `Meta`.
        arith: where activations are rounded, one of `ds4.teacher.numerics.ARITHMETICS`.
        say: told the sizes, before any work starts; silent where the cache has the file.
        crew: who else computes, with the same bits.

    Raises:
        FileFormatError: the checkpoint is broken, or the cached file is; names it.
        UsageError: no such arithmetic, no folder can be made, or another process computes the same file.
        RequestError: ids outside the vocabulary.
        CapacityError: the disk cannot hold it, found before the work, or a window is too long.
        Ds4Error: a value is not finite.
    """
    teacher, folder = Teacher(open_source(checkpoint), arith), Path(folder)
    mark, model = weights_mark(checkpoint), model_fingerprint(teacher.stream.source)
    meta = Meta(model, domain, split, length, f"f32 {arith}", "prefill", f"{Path(checkpoint).resolve().name} {mark}")
    path = folder / f"{model}-{mark}-{text.digest[:16]}-{length}-{arith}.npz"
    if path.exists():
        return _cached(path, text, meta)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"{folder}: no folder for the original's scores can be made there ({e.strerror})") from e
    writer = ScoresWriter(path, text, meta, teacher.config.vocab_size)
    helpers = None if crew is None else Helpers(crew, str(Path(checkpoint).resolve()), arith)
    walk = Walk(teacher, [text.ids[part] for part in text.slices], helpers)
    if say is not None:
        say(
            f"{path}: {writer.nbytes:,} bytes, {len(text):,} tokens in {len(text.slices)} windows; while it is made "
            f"{writer.nbytes + 2 * walk.saved_bytes:,} bytes more"
        )
    # the rows, which the writer reserves; the walk, twice while it is replaced; the rows once more, packed
    reserved = path.with_name(path.name + ".rows.part").exists()
    need = writer.nbytes + 2 * walk.saved_bytes + (0 if reserved else writer.nbytes)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise CapacityError(
            f"{path}: needs {need:,} bytes while it is made, {free:,} are free in {folder}; "
            "make room, or take fewer tokens"
        )
    with writer:
        return _compute(writer, walk, progress)


def _cached(path: Path, text: Text, meta: Meta) -> Scores:
    """What is in the file; its domain and names become the asker's: one text may be asked for under several."""
    scores = Scores.load(path)
    theirs = (scores.meta.model, scores.meta.length, scores.meta.arithmetic, scores.text.digest)
    if theirs != (meta.model, meta.length, meta.arithmetic, text.digest):
        raise FileFormatError(f"{path}: holds other scores than its name says; remove it, it will be made again")
    return Scores(scores.text, scores.logits, meta)


def _compute(writer: ScoresWriter, walk: Walk, progress: Progress | None) -> Scores:
    saved = writer.path.with_name(writer.path.name + ".walk")
    key = f"{writer.meta.to_json()} {writer.text.digest}"
    walk.load(saved, key)
    n_windows = len(writer.text.slices)
    done, steps = walk.layer + n_windows - len(writer.missing()), walk.n_layers + n_windows
    while not walk.done:
        walk.advance()
        walk.save(saved, key)
        done += 1
        if progress is not None:
            progress(done, steps)
    missing = writer.missing()
    for w, logits in zip(missing, walk.logits_of(missing), strict=True):
        writer.put(w, logits)
        done += 1
        if progress is not None:
            progress(done, steps)
    scores = writer.publish()
    saved.unlink(missing_ok=True)
    return scores
