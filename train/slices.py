"""Write the judge and fit slices that ship with the embedded model, from the corpora's held-out documents.

    python -m train.slices [--work DIR] [--to DIR]

For each domain: {judge,fit}.jsonl with rows {"source", "text"} and manifest.toml; for all, LICENSES.md.  Only sources
whose licence allows it; documents in the corpora's order, the sources in like shares.  The same corpora give the same
bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.checkpoint.writer import replace_file
from ds4.errors import Ds4Error, FileFormatError
from train.attributions import ATTRIBUTIONS, HELD_BACK, LICENCE_TEXTS, LicenceText
from train.config import DOMAINS, UNSEEN, WORK, corpus_path, read_rows
from train.dedupe import leak
from train.packages import members
from train.sources.law import FRONT
from train.sources.text import decode

WANTED = {"judge": 100_000, "fit": 200_000}  # bytes of text a domain
LONGEST = 20_000  # bytes of a document; a longer one is cut at a paragraph
SHORTEST = 200  # bytes left to a source, below which no piece of a document is taken
# Text out of its context should send nobody to a package index.
INDEXES = re.compile(r"pypi|npm ?js|pythonhost", re.I)

Row = dict[str, Any]


def read_manifest(work: Path) -> dict[str, Any]:
    """The corpora's manifest.

    Raises:
        FileFormatError: missing or not JSON.
    """
    path = work / "corpora" / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{path}: cannot be read ({e}); run `python -m train.corpora` first") from e
    return manifest


def head(text: str, most: int) -> str:
    """As many whole paragraphs from the start of `text` as fit into `most` bytes of UTF-8; "" if none does."""
    if len(text.encode()) <= most:
        return text
    kept: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        size += len(paragraph.encode()) + (2 if kept else 0)
        if size > most:
            break
        kept.append(paragraph)
    return "\n\n".join(kept).rstrip()


def quotas(sizes: dict[str, int], wanted: int) -> dict[str, int]:
    """Bytes to take of each source: like shares of `wanted`, and what a small source cannot give from the others."""
    out: dict[str, int] = {}
    left = dict(sorted(sizes.items(), key=lambda item: (item[1], item[0])))
    while left:
        share = max(wanted - sum(out.values()), 0) // len(left)
        source = next(iter(left))
        out[source] = min(left.pop(source), share)
    return out


def choose(rows: Iterable[Row], wanted: int) -> list[Row]:
    """Whole documents of each source in the rows' order, up to its quota; the last and the long ones cut."""
    pieces = [{"source": row["source"], "text": head(row["text"], LONGEST)} for row in rows]
    sizes: dict[str, int] = {}
    for row in pieces:
        sizes[row["source"]] = sizes.get(row["source"], 0) + len(row["text"].encode())
    left = quotas(sizes, wanted)
    chosen = []
    for row in pieces:
        text = head(row["text"], left[row["source"]])
        if len(text.encode()) < SHORTEST:
            continue
        left[row["source"]] -= len(text.encode())
        chosen.append({"source": row["source"], "text": text})
    return chosen


def toml_value(value: Any) -> str:
    """A TOML string, boolean, number or inline table of them."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + " }"
    # A JSON string without surrogate escapes is a TOML basic string.
    return json.dumps(value, ensure_ascii=False)


def manifest_toml(domain: str, slices: dict[str, list[Row]], files: dict[str, bytes], sources: dict[str, Row],
                  leaks: dict[str, float]) -> str:  # fmt: skip
    """The domain's manifest: the two files, then the sources that they hold."""
    lines = [f"# Held-out text of the domain {domain}: no training saw it. Licences: ../LICENSES.md", ""]
    lines += [f"domain = {toml_value(domain)}", ""]
    for split, rows in slices.items():
        lines += [f"[{split}]", f"file = {toml_value(split + '.jsonl')}"]
        lines += [f"sha256 = {toml_value(hashlib.sha256(files[split]).hexdigest())}"]
        lines += [f"documents = {len(rows)}", f"bytes = {sum(len(row['text'].encode()) for row in rows)}"]
        if split in leaks:
            lines += ["# share of its 50-byte runs that occur in the training text", f"in_train = {leaks[split]:.5f}"]
        lines.append("")
    used = sorted({row["source"] for rows in slices.values() for row in rows})
    for name in used:
        source = sources[name]
        lines.append("[[sources]]")
        for key in ("id", "package", "kind", "version", "file", "sha256", "licence"):
            lines.append(f"{key} = {toml_value(source[key])}")
        lines.append(f"title = {toml_value(ATTRIBUTIONS[name].title)}")
        own = {split: [row for row in rows if row["source"] == name] for split, rows in slices.items()}
        lines.append(f"documents = {toml_value({split: len(rows) for split, rows in own.items()})}")
        sizes = {split: sum(len(row["text"].encode()) for row in rows) for split, rows in own.items()}
        lines += [f"bytes = {toml_value(sizes)}", ""]
    return "\n".join(lines)


def licence_text(work: Path, wanted: LicenceText) -> str:
    """The licence's words out of the package they come with.

    Raises:
        FileFormatError: the package is not in the working folder, or has no such member.
    """
    index = json.loads((work / "packages" / "fetched.json").read_text())
    noted = index.get(wanted.package.key)
    path = work / "packages" / noted["file"] if noted else None
    if path is None or not path.is_file():
        raise FileFormatError(
            f"{work / 'packages'}: {wanted.package.key} is not there; run `python -m train.corpora`"
        )
    for _name, data in members(path, lambda name: ("/" + name).endswith(wanted.member)):
        text = FRONT.sub("", decode(data))
        if wanted.cut:
            text = text.split("\n----")[0]
        return text.strip("\n")
    raise FileFormatError(f"{path}: has no {wanted.member}; the package has changed, correct train/attributions.py")


def licences_md(work: Path, used: dict[str, tuple[str, Row]]) -> str:
    """LICENSES.md: each source with its makers and terms, then the licences whose text must come along."""
    lines = ["# Licences of the text in these folders", ""]
    lines += ["Each document names its source; each source's package, version and hash are in its domain's"]
    lines += ["manifest.toml. Changes to all of them: markup was taken away, white space evened out, repeated"]
    lines += ["paragraphs dropped, documents cut at paragraphs. Every source stays under its own licence. Written by"]
    lines += ["`python -m train.slices`.", ""]
    for name, (domain, source) in used.items():
        told = ATTRIBUTIONS[name]
        lines += [f"## {name}", "", f"{told.title}, by {told.by}.", ""]
        lines += [f"- domain: {domain}", f"- package: {source['package']} {source['version']} ({source['kind']})"]
        lines += [f"- licence: {source['licence']}", ""]
        if told.note:
            lines += [told.note, ""]
    for wanted in dict.fromkeys(LICENCE_TEXTS[name] for name in used if name in LICENCE_TEXTS):
        lines += [f"## Text of {wanted.heading}", "", "```text", licence_text(work, wanted), "```", ""]
    return "\n".join(lines)


def write_slices(work: Path, to: Path) -> int:
    """Write all domains' slices, manifests and LICENSES.md under `to`; returns the bytes written.

    Raises:
        FileFormatError: the corpora are missing, a domain has no text that may ship, a source has no attribution.
    """
    manifest = read_manifest(work)
    sources = {source["id"]: source for source in manifest["sources"]}
    allowed = {name for name, source in sources.items() if source["ship"] and name not in HELD_BACK}
    nameless = sorted(allowed - set(ATTRIBUTIONS))
    if nameless:
        raise FileFormatError(f"train/attributions.py: says nothing of {', '.join(nameless)}, which may not ship so")
    used: dict[str, tuple[str, Row]] = {}
    written: dict[Path, bytes] = {}
    for domain in (*DOMAINS, UNSEEN):
        slices: dict[str, list[Row]] = {}
        for split, wanted in WANTED.items():
            rows = [row for row in read_rows(corpus_path(work, domain, split)) if row["source"] in allowed]
            rows = [row for row in rows if not INDEXES.search(row["text"])]
            slices[split] = choose(rows, wanted)
            if not slices[split]:
                raise FileFormatError(f"{corpus_path(work, domain, split)}: has no text that may ship")
        leaks: dict[str, float] = {}
        if domain != UNSEEN:
            train = [row["text"] for row in read_rows(corpus_path(work, domain, "train"))]
            leaks = {split: leak([row["text"] for row in rows], train) for split, rows in slices.items()}
        files = {
            split: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
            for split, rows in slices.items()
        }
        for split, data in files.items():
            written[to / domain / f"{split}.jsonl"] = data
        written[to / domain / "manifest.toml"] = manifest_toml(domain, slices, files, sources, leaks).encode()
        for rows in slices.values():
            for row in rows:
                used.setdefault(row["source"], (domain, sources[row["source"]]))
        told = ", ".join(
            f"{split} {len(rows)} documents, {len(files[split])} bytes" for split, rows in slices.items()
        )
        shares = ", ".join(f"{split} {share:.2%}" for split, share in leaks.items())
        print(f"{domain}: {told}" + (f"; in train: {shares}" if shares else ""), flush=True)
    written[to / "LICENSES.md"] = licences_md(work, used).encode()
    for path, data in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    return sum(len(data) for data in written.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.slices", description="Write the slices that ship.")
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    parser.add_argument(
        "--to", type=Path, default=embedded.HOME / "corpora", help="where they go (default the package)"
    )
    args = parser.parse_args(argv)
    try:
        size = write_slices(args.work, args.to)
    except Ds4Error as e:
        print(f"slices: {e}", file=sys.stderr)
        return 1
    print(f"{args.to}: {size / 1e6:.2f} MB; now bring SHA256SUMS up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
