"""Make the corpora: fetch packages by name, extract their text, drop what repeats, split by document.

    python -m train.corpora [--work DIR] [--only DOMAIN ...]

Writes DIR/corpora/{domain}.{train,fit,judge}.jsonl and DIR/corpora/manifest.json.  Stops and starts anywhere: whole
packages are kept, half ones never count.  The same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.checkpoint.writer import replace_file
from ds4.errors import Ds4Error
from train.dedupe import ShingleSet, leak, repeated_shares
from train.packages import Fetched, Package, PackageError, Store
from train.sources import Source, all_sources
from train.sources.text import stable_hash

LOCK = Path(__file__).with_name("packages.lock.json")
SPLITS = ("train", "fit", "judge")
NEEDED_BYTES = 1_500_000_000  # packages .5 GB, corpora .2 GB, the scratch of the largest package, and room
SHORTEST = 200  # characters; a shorter document says nothing about context
# A run goes on without a package while its domain keeps this many bytes of training text (unseen: judging text).
FLOORS = {
    "code": 10_000_000, "law": 4_000_000, "medicine": 5_000_000, "science": 3_000_000, "finance": 500_000,
    "general": 15_000_000, "chinese": 1_000_000, "unseen": 300_000,
}  # fmt: skip
# Held-out text wanted from the sources whose licence lets it ship, and the most of such a source that it may take.
WANTED = {"judge": 330_000, "fit": 450_000}
MOST = {"judge": 0.16, "fit": 0.18}
UNSHIPPED = {"judge": 0.008, "fit": 0.008}
HELD_OUT = {"judge": 0.4, "fit": 0.6}
REPEATS = 0.75  # a paragraph of which this share lies in earlier paragraphs is dropped
LEAKS = 0.1  # a held-out paragraph of which this share lies in the training text is dropped
WHOLE = frozenset(["code"])  # domains where whole documents are compared and dropped, not paragraphs


@dataclass(frozen=True)
class Document:
    """One document of a source, named by its key within it."""

    source: str
    key: str
    text: str

    @property
    def place(self) -> float:
        """Where the document falls in [0, 1): a hash of its name, so a change of text moves no other document."""
        return stable_hash(f"{self.source}\n{self.key}") / 2**64


def clean(text: str, domain: str) -> str:
    """Unix line ends, no tabs (but in code), no trailing blanks, at most one blank line in a row (two in code)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "").replace("\x00", "")
    if domain != "code":
        text = text.replace("\t", "    ").replace("\f", "\n\n").replace("\xa0", " ")
        text = re.sub(r"^[ ]*[-=_*~#+.]{4,}[ ]*$", "", text, flags=re.M)
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n" if domain != "code" else "\n\n\n", text).strip("\n").rstrip()


def capped(documents: list[Document], cap: int | None) -> list[Document]:
    """The documents in the order of their places, as many as fit into `cap` bytes."""
    documents = sorted(documents, key=lambda document: (document.place, document.key))
    if cap is None:
        return documents
    kept, total = [], 0
    for document in documents:
        total += len(document.text.encode())
        if total > cap:
            break
        kept.append(document)
    return kept


def without_repeats(documents: list[Document], domain: str) -> list[Document]:
    """Drop what repeats, across the whole domain: paragraphs (whole documents in code) that lie in earlier ones."""
    whole = domain in WHOLE
    parts = [[document.text] if whole else document.text.split("\n\n") for document in documents]
    shares = iter(repeated_shares([part for paragraphs in parts for part in paragraphs]).tolist())
    kept = []
    for document, paragraphs in zip(documents, parts):
        text = "\n\n".join([part for part in paragraphs if next(shares) < REPEATS]).strip("\n")
        if len(text) >= SHORTEST:
            kept.append(Document(document.source, document.key, text))
    return kept


def shares_of(documents: list[Document], sources: dict[str, Source]) -> dict[str, dict[str, float]]:
    """{source: {"judge", "fit": share of its documents held out}}, from the bytes that may ship."""
    sizes: dict[str, int] = {}
    for document in documents:
        sizes[document.source] = sizes.get(document.source, 0) + len(document.text.encode())
    shippable = sum(size for source, size in sizes.items() if sources[source].ship and not sources[source].held_out)
    shares: dict[str, dict[str, float]] = {}
    for source in sizes:
        if sources[source].held_out:
            shares[source] = dict(HELD_OUT)
        elif sources[source].ship:
            shares[source] = {name: min(MOST[name], WANTED[name] / shippable) for name in WANTED}
        else:
            shares[source] = dict(UNSHIPPED)
    return shares


def split(documents: list[Document], shares: dict[str, dict[str, float]]) -> dict[str, list[Document]]:
    """Each document into one split, by its place alone."""
    splits: dict[str, list[Document]] = {name: [] for name in SPLITS}
    for document in documents:
        share = shares[document.source]
        # The cap keeps low places, so the place is hashed once more before it decides.
        at = stable_hash(f"split\n{document.source}\n{document.key}") / 2**64
        name = "judge" if at < share["judge"] else "fit" if at < share["judge"] + share["fit"] else "train"
        splits[name].append(document)
    return splits


def without_leaks(held_out: list[Document], train: list[Document], domain: str) -> list[Document]:
    """Drop from held-out documents the paragraphs (in code: the documents) that lie in the training text."""
    known = ShingleSet([document.text for document in held_out])
    known.mark([document.text for document in train])
    kept = []
    for document in held_out:
        parts = [document.text] if domain in WHOLE else document.text.split("\n\n")
        text = "\n\n".join(part for part in parts if known.share(part) < LEAKS).strip("\n")
        if len(text) >= SHORTEST:
            kept.append(Document(document.source, document.key, text))
    return kept


def make_domain(domain: str, found: list[tuple[Source, Path]]) -> dict[str, list[Document]]:
    """All of a domain's documents, clean, without repeats, in splits; each split in the order of the places."""
    documents: list[Document] = []
    for source, path in found:
        texts = ((key, clean(text, domain)) for key, text in source.extract(path))
        own = [Document(source.id, key, text) for key, text in texts if len(text) >= SHORTEST]
        documents += capped(own, source.cap)
    documents.sort(key=lambda document: (document.place, document.source, document.key))
    documents = without_repeats(documents, domain)
    splits = split(documents, shares_of(documents, {source.id: source for source, _ in found}))
    for name, others in (("judge", ("train", "fit")), ("fit", ("train",))):
        against = [document for other in others for document in splits[other]]
        splits[name] = without_leaks(splits[name], against, domain)
    return splits


def size(documents: Iterable[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def write_split(path: Path, documents: list[Document]) -> None:
    rows = [json.dumps({"source": d.source, "text": d.text}, ensure_ascii=False) + "\n" for d in documents]
    replace_file(path, "".join(rows).encode())


def describe(source: Source, fetched: Fetched, splits: dict[str, list[Document]]) -> dict[str, Any]:
    own = {name: [d for d in documents if d.source == source.id] for name, documents in splits.items()}
    return {
        "id": source.id, "domain": source.domain, "package": fetched.name, "kind": fetched.kind,
        "version": fetched.version, "file": fetched.file, "sha256": fetched.sha256, "licence": source.licence,
        "licence_text_from": source.licence_text_from, "ship": source.ship,
        "documents": {name: len(documents) for name, documents in own.items()},
        "bytes": {name: size(documents) for name, documents in own.items()},
    }  # fmt: skip


class CorporaError(Ds4Error):
    """A run that cannot go on; the message is the one line for the user."""


def run(work: Path, sources: list[Source], only: set[str] | None, lock_path: Path = LOCK,
        floors: dict[str, int] = FLOORS) -> dict[str, Any]:  # fmt: skip
    """Make the corpora of the domains in `only` (None: all) and return the manifest.

    Raises CorporaError when the disk is too small, a package is not what the lock says, or a domain falls under its
    floor; what was made of other domains stays.
    """
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < NEEDED_BYTES:
        raise CorporaError(
            f"{work}: the corpora need {NEEDED_BYTES / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free; "
            "free some or give another folder with --work"
        )
    folder = work / "corpora"
    folder.mkdir(exist_ok=True)
    manifest_path = folder / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    lock: dict[str, dict[str, str]] = json.loads(lock_path.read_text()) if lock_path.exists() else {}
    store = Store(work / "packages", lock)
    domains = [domain for domain in dict.fromkeys(source.domain for source in sources) if not only or domain in only]
    rows = [row for row in manifest.get("sources", []) if row["domain"] not in domains]
    missing = [row for row in manifest.get("missing", []) if row.get("domain") not in domains]
    leaks = {name: value for name, value in manifest.get("leak", {}).items() if name not in domains}
    used: dict[str, dict[str, str]] = {}
    failed: dict[Package, str] = {}
    for domain in domains:
        started = time.monotonic()
        found: list[tuple[Source, Path, Fetched]] = []
        for source in (source for source in sources if source.domain == domain):
            try:
                if source.package in failed:
                    raise PackageError(failed[source.package])
                fetched = store.fetch(source.package)
            except PackageError as error:
                if "lock file says" in str(error):
                    raise CorporaError(str(error)) from error
                failed[source.package] = str(error)
                missing.append({"id": source.id, "domain": domain, "why": str(error)})
                print(f"missing: {source.id}: {error}", flush=True)
                continue
            used[source.package.key] = {key: getattr(fetched, key) for key in ("version", "file", "sha256")}
            found.append((source, store.folder / fetched.file, fetched))
        splits = make_domain(domain, [(source, path) for source, path, _ in found])
        bytes_of = {name: size(documents) for name, documents in splits.items()}
        kept = bytes_of["judge" if domain == "unseen" else "train"]
        if kept < floors.get(domain, 0):
            lost = [row["id"] for row in missing if row["domain"] == domain]
            raise CorporaError(
                f"domain {domain}: only {kept / 1e6:.2f} MB of text of the {floors[domain] / 1e6:.2f} MB needed; "
                f"sources missing: {', '.join(lost) or 'none'}"
            )
        for name, documents in splits.items():
            if documents or domain != "unseen":
                write_split(folder / f"{domain}.{name}.jsonl", documents)
        texts = {name: [document.text for document in documents] for name, documents in splits.items()}
        leaks[domain] = {
            f"{name}_in_{other}": round(leak(texts[name], texts[other]), 5)
            for name, other in (("judge", "train"), ("judge", "fit"), ("fit", "train"))
        }
        rows += [describe(source, fetched, splits) for source, _, fetched in found]
        manifest = {"sources": rows, "missing": missing, "leak": leaks}
        replace_file(manifest_path, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
        sizes = ", ".join(f"{name} {bytes_of[name] / 1e6:.2f}" for name in SPLITS)
        print(f"{domain}: MB {sizes}; leak {leaks[domain]}; {time.monotonic() - started:.0f} s", flush=True)
    merged = {**lock, **used}
    if merged != lock:
        replace_file(lock_path, (json.dumps(merged, indent=1, sort_keys=True) + "\n").encode())
        print(f"{lock_path.name}: {len(used)} packages recorded")
    return manifest


def main(arguments: list[str] | None = None) -> int:
    sources = all_sources()
    domains = list(dict.fromkeys(source.domain for source in sources))
    parser = argparse.ArgumentParser(prog="python -m train.corpora", description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("var/train"), help="working folder (default var/train)")
    parser.add_argument("--only", nargs="+", choices=domains, metavar="DOMAIN", help=f"of {', '.join(domains)}")
    options = parser.parse_args(arguments)
    try:
        run(options.work, sources, set(options.only) if options.only else None)
    except (Ds4Error, OSError) as error:
        print(f"corpora: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
