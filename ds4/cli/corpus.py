"""`ds4 corpus`: a domain from text of one's own, and a look at one."""

from __future__ import annotations

import argparse
import json

from ds4.corpus import SLICES, Domain
from ds4.corpus.build import LEAST_BYTES, LEAST_GROUPS, build


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "corpus",
        help="make a domain from text, or look at one",
        description="Domains: text in two slices, fit to solve on and judge to measure on (docs/domains.md).",
    )
    commands = p.add_subparsers(dest="corpus_command", metavar="COMMAND", required=True)
    b = commands.add_parser(
        "build",
        help="split text into a domain's slices",
        description="Split text by document into fit and judge, which share no document and no long passage.",
        epilog=f"A slice needs {LEAST_GROUPS} documents that share no text, fit {LEAST_BYTES['fit']:,} bytes and "
        f"judge {LEAST_BYTES['judge']:,}. The same text gives the same bytes.",
    )
    b.add_argument("--name", required=True, help="what the domain is called")
    b.add_argument(
        "--text", required=True, nargs="+", action="extend", metavar="DIR|FILE",
        help='a folder, a text file (one document) or a .jsonl file (rows with "text", and "id", "source" if wanted)',
    )  # fmt: skip
    b.add_argument("-o", "--out", required=True, metavar="OUT", help="the folder to write")
    b.add_argument("--licence", default="not stated", metavar="TEXT", help="the text's terms, for the manifest")
    b.add_argument("--force", action="store_true", help="replace another domain at OUT")
    b.add_argument("--json", action="store_true", help="print the counts as JSON")
    b.set_defaults(run=_build)
    s = commands.add_parser(
        "show",
        help="check a domain and count it",
        description="Open a domain as every other command does, hashes and overlap checked, and say what is in it.",
    )
    s.add_argument("domain", metavar="DOMAIN", help="a folder, or the name of an embedded domain")
    s.add_argument("--json", action="store_true", help="print the counts as JSON")
    s.set_defaults(run=_show)


def _build(args: argparse.Namespace) -> int:
    report = build(args.name, args.text, args.out, args.licence, args.force)
    if args.json:
        print(json.dumps(report))
        return 0
    counts = []
    for name in SLICES:
        of_slice = report[name]
        counts.append(
            f"{name} {of_slice['documents']} documents ({of_slice['groups']} that share no text), "
            f"{of_slice['bytes']:,} bytes"
        )
    left_out = f"left out {report['repeated']} repeats, {report['empty']} empty"
    already = "" if report["written"] else "; was there already, unchanged"
    print(f"{report['out']}: {', '.join(counts)}; {left_out}{already}")
    return 0


def _show(args: argparse.Namespace) -> int:
    domain = Domain.open(args.domain)
    slices = {
        s: {
            "documents": len(domain.documents(s)),
            "bytes": sum(len(d.text.encode()) for d in domain.documents(s)),
            "sha256": domain.sha256(s),
        }
        for s in SLICES
    }
    sources = {str(source["id"]): str(source["licence"]) for source in domain.manifest["sources"]}
    if args.json:
        print(json.dumps({"domain": domain.name, "folder": str(domain.folder), **slices, "sources": sources}))
        return 0
    print(f"{domain.name} ({domain.folder})")
    for s, of_slice in slices.items():
        print(
            f"  {s:5} {of_slice['documents']:5} documents, {of_slice['bytes']:,} bytes, sha256 {of_slice['sha256']}"
        )
    for source, licence in sources.items():
        print(f"  source {source}: {licence}")
    return 0
