"""Text in, a domain's folder out: the split by document, and the refusal when there is too little.

Documents that share text (likeness.py) form a group, and a group goes to one side whole. Groups are taken in the
order of a hash of their text, so the order says nothing about them and needs no seed; each goes where its source,
then the domain as a whole, is furthest below its share. The same text gives the same bytes, in whatever order it was
named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds4 import embedded
from ds4.corpus.domain import MANIFEST, SLICES, Document
from ds4.corpus.likeness import PASSAGE, Runs, groups, normalised, shared
from ds4.corpus.read import Input, read_inputs
from ds4.errors import CapacityError, Ds4Error, UsageError

SHARES = {"fit": 2, "judge": 1}  # of the bytes
# A slice below these is refused: standard errors are clustered by group, and a solver wants some 8,000 tokens.
LEAST_GROUPS = 5
LEAST_BYTES = {"fit": 64_000, "judge": 32_000}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Split:
    """Documents of each slice in file order, groups a slice, and documents left out as repeats of others."""

    slices: Mapping[str, tuple[Document, ...]]
    n_groups: Mapping[str, int]
    repeated: tuple[Document, ...]


def build(
    name: str, paths: Sequence[str | Path], out: str | Path, licence: str = "not stated", overwrite: bool = False
) -> dict[str, Any]:
    """Read, split, write OUT/{fit,judge}.jsonl and OUT/manifest.toml; returns what was counted.

    Args:
        licence: the terms of all the text, for the manifest.
        overwrite: replace another domain at OUT. The same domain at OUT is left as it is.

    Raises:
        UsageError: a name that cannot be, text that is not there or too little, OUT is something else.
        FileFormatError: a file that is not text, a row that is no document.
        CapacityError: the disk cannot hold it. Ds4Error: it cannot be written. Nothing is left behind.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"--name {name!r}: letters, digits, '.', '_' and '-', at most 64, first a letter or digit")
    if name in embedded.domains():
        raise UsageError(f"--name {name!r}: an embedded domain is called so; choose another name")
    out = Path(os.path.abspath(Path(out).expanduser()))
    inputs = read_inputs(paths)
    found = split([d for read in inputs for d in read.documents])
    problem = too_little(found)
    if problem is not None:
        raise UsageError(f"{problem}; nothing was written")
    files = {f"{slice}.jsonl": _lines(documents) for slice, documents in found.slices.items()}
    files[MANIFEST] = _manifest(name, licence, found, inputs, files).encode()
    written = _write(out, files, overwrite)
    return {
        "domain": name,
        "out": str(out),
        "written": written,
        **{
            s: {"documents": len(d), "groups": found.n_groups[s], "bytes": _n_bytes(d)}
            for s, d in found.slices.items()
        },
        "repeated": len(found.repeated),
        "empty": sum(read.empty for read in inputs),
        "sha256": {s: hashlib.sha256(files[f"{s}.jsonl"]).hexdigest() for s in SLICES},
    }


def split(documents: Sequence[Document]) -> Split:
    """Divide documents by group; repeats of another (equal when normalised) are left out."""
    documents = sorted(documents, key=lambda d: d.key)
    texts = [normalised(d.text).encode() for d in documents]
    group = groups(len(texts), ((a, b) for a, b, _ in shared(texts)))
    digests = [hashlib.sha256(text).digest() for text in texts]
    members: dict[int, list[int]] = {}
    repeated, seen = [], set()
    for i, digest in enumerate(digests):
        if digest in seen:
            repeated.append(documents[i])
        else:
            members.setdefault(int(group[i]), []).append(i)
        seen.add(digest)
    slices: dict[str, list[Document]] = {s: [] for s in SLICES}
    n_groups = dict.fromkeys(SLICES, 0)
    by_source: dict[tuple[str, str], int] = {}
    total = dict.fromkeys(SLICES, 0)
    for of_group in sorted(members.values(), key=lambda m: min(digests[i] for i in m)):
        of_group = sorted(of_group, key=lambda i: digests[i])
        source = documents[of_group[0]].source
        to = min(
            SLICES,
            key=lambda s: (by_source.get((s, source), 0) / SHARES[s], total[s] / SHARES[s], SLICES.index(s)),
        )
        for i in of_group:
            slices[to].append(documents[i])
            n_bytes = len(documents[i].text.encode())
            total[to] += n_bytes
            by_source[to, documents[i].source] = by_source.get((to, documents[i].source), 0) + n_bytes
        n_groups[to] += 1
    return Split({s: tuple(d) for s, d in slices.items()}, n_groups, tuple(repeated))


def too_little(found: Split) -> str | None:
    """Why the text does not make a domain, with numbers; None if it does."""
    short = [
        f"{s} would have {found.n_groups[s]} documents that share no text and {_n_bytes(d):,} bytes, "
        f"it needs {LEAST_GROUPS} and {LEAST_BYTES[s]:,}"
        for s, d in found.slices.items()
        if found.n_groups[s] < LEAST_GROUPS or _n_bytes(d) < LEAST_BYTES[s]
    ]
    if not short:
        return None
    documents = [d for of_slice in found.slices.values() for d in of_slice]
    n_groups = sum(found.n_groups.values())
    left_out = f" ({len(found.repeated)} repeats left out)" if found.repeated else ""
    text = f"too little text: {len(documents)} documents{left_out}, {_n_bytes(documents):,} bytes; {'; '.join(short)}"
    passage = _binding_passage(documents) if len(documents) >= 2 * LEAST_GROUPS > n_groups else None
    if passage is not None:
        count, words = passage
        text += f"; {count} documents are one group because they share {words!r}: take that passage out"
    return text


def _binding_passage(documents: Sequence[Document]) -> tuple[int, str] | None:
    """(how many documents, its beginning) of the passage that most documents share."""
    texts = [normalised(d.text).encode() for d in documents]
    runs = Runs(max(map(len, texts)))
    hashes = [np.unique(runs.of(text)) for text in texts]
    values, counts = np.unique(np.concatenate(hashes), return_counts=True)
    if not len(values) or counts.max() < 2:
        return None
    most = values[counts == counts.max()]
    for text in texts:
        at = np.flatnonzero(np.isin(runs.of(text), most))
        if len(at):
            return int(counts.max()), text[at[0] : at[0] + PASSAGE].decode(errors="replace")[:60] + "..."
    return None


def _n_bytes(documents: Sequence[Document]) -> int:
    return sum(len(d.text.encode()) for d in documents)


def _lines(documents: Sequence[Document]) -> bytes:
    rows = ({"id": d.id, "source": d.source, "text": d.text} for d in documents)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _manifest(name: str, licence: str, found: Split, inputs: Sequence[Input], files: Mapping[str, bytes]) -> str:
    lines = ["# Written by `ds4 corpus build`: no source document is in both slices.", ""]
    lines += [f"domain = {_toml(name)}"]
    lines += ["# documents with so many bytes in common are on one side", f"passage = {PASSAGE}", ""]
    for s, documents in found.slices.items():
        digest = hashlib.sha256(files[f"{s}.jsonl"]).hexdigest()
        lines += [f"[{s}]", f"file = {_toml(s + '.jsonl')}", f"sha256 = {_toml(digest)}"]
        lines += [f"documents = {len(documents)}", f"groups = {found.n_groups[s]}"]
        lines += [f"bytes = {_n_bytes(documents)}", ""]
    for read in inputs:
        lines += ["[[inputs]]", f"name = {_toml(read.name)}", f"sha256 = {_toml(read.sha256)}"]
        lines += [f"documents = {len(read.documents)}", f"empty = {read.empty}", ""]
    everything = [d for documents in found.slices.values() for d in documents]
    for source in sorted({d.source for d in [*everything, *found.repeated]}):
        own = {s: [d for d in documents if d.source == source] for s, documents in found.slices.items()}
        lines += ["[[sources]]", f"id = {_toml(source)}", f"licence = {_toml(licence)}"]
        lines += [f"documents = {{ {', '.join(f'{s} = {len(d)}' for s, d in own.items())} }}"]
        lines += [f"bytes = {{ {', '.join(f'{s} = {_n_bytes(d)}' for s, d in own.items())} }}"]
        lines += [f"repeated = {sum(d.source == source for d in found.repeated)}", ""]
    return "\n".join(lines)


def _toml(text: str) -> str:
    """A TOML basic string: JSON's, but for the one control character that JSON leaves alone."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write(out: Path, files: Mapping[str, bytes], overwrite: bool) -> bool:
    """Put a folder of these files at `out` by a rename; False if just that is there already."""
    if os.path.lexists(out):
        names = {p.name for p in out.iterdir()} if out.is_dir() and not out.is_symlink() else None
        if names is not None and names == set(files) and all((out / n).read_bytes() == d for n, d in files.items()):
            return False
        if names is None or (names and MANIFEST not in names) or names - set(files):
            raise UsageError(f"{out}: is there and is no domain that this command wrote; choose another -o")
        if names and not overwrite:
            raise UsageError(f"{out}: another domain is there; replace it with --force, or choose another -o")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such folder to put {out.name} in")
    need, free = sum(map(len, files.values())), shutil.disk_usage(out.parent).free
    if free < need:
        raise CapacityError(f"{out}: needs {need} bytes, {free} are free in {out.parent}; make room")
    beside = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    old = out.with_name(f".{out.name}.{secrets.token_hex(4)}.old")
    try:
        beside.mkdir()
        for name, data in files.items():
            with open(beside / name, "xb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
        if out.exists():
            os.rename(out, old)
        os.rename(beside, out)
    except OSError as e:
        if old.exists() and not out.exists():
            os.rename(old, out)
        kind = CapacityError if e.errno == 28 else Ds4Error
        raise kind(f"{out}: cannot be written ({e.strerror or e})") from e
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return True
