"""What an exported checkpoint is worth: `python -m train.evaluate -m FOLDER [--work DIR] [-o FILE]`.

Everything is measured on the released layout, so with FP4 experts and FP8 matrices, on judge text that training never
saw, with the indexer's choice in force:

- bits per byte by domain, document by document, beside the Witten-Bell trigrams of `train.ngram`;
- bits per byte by position in documents of 4,097 tokens and more;
- how evenly the router spreads tokens, by layer;
- drafts: expected accepted at temperature 1, greedy agreement by row, and what the confidences say about them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds4.checkpoint.writer import replace_file
from ds4.engram.tables import derive_tables
from ds4.errors import Ds4Error, FileFormatError
from ds4.model.tokenizer import Tokenizer
from train import ops
from train.config import DIALOGUES, DOMAINS, UNSEEN, WORK
from train.data import TokenFile, held_out, read_index
from train.draft import ANCHORS, FIRST_ANCHOR, JUDGED, Draft
from train.model import Model
from train.weights import read_checkpoint

CLAIMED = ("code", "law", "medicine", "science", "finance", "general")
WINDOW, CONTEXT = 1024, 256  # a long document is read in windows; a later one scores what comes after its context
LONG = 4096
BUCKETS = (0, 256, 1024, 2048, 4096)
SHORT = (
    256  # windows are padded to this or to WINDOW, batches to CELLS: training's shapes, which are compiled already
)
CELLS = 4096  # tokens at once
LEVELS = 5  # bins of the confidences


def load(folder: Path) -> tuple[Model, dict[str, Tensor]]:
    """The trunk and the draft stages' weights of a checkpoint in the released layout."""
    config, state = read_checkpoint(folder)
    tables = derive_tables(config, Tokenizer.from_file(folder / "tokenizer.json", config))
    weights = {n: torch.from_numpy(np.ascontiguousarray(w)) for n, w in state.items()}
    model = Model(config, tables, fused=ops.pieces(compiled=True))
    model.load_weights({n: w for n, w in weights.items() if not n.startswith("mtp.")})
    return model, {n: w for n, w in weights.items() if n.startswith("mtp.")}


def documents(work: Path, domain: str) -> list[np.ndarray[Any, Any]]:
    """Judge documents of a domain as token ids, BOS first."""
    file = TokenFile(work, domain, "judge")
    ends = [*file.starts[1:].tolist(), len(file.ids)]
    return [np.asarray(file.ids[a:b], np.int64) for a, b in zip(file.starts.tolist(), ends)]


def windows(docs: list[np.ndarray[Any, Any]]) -> dict[int, list[tuple[np.ndarray[Any, Any], int]]]:
    """Padded length -> (ids of one window, how many of its first predictions belong to the window before)."""
    out: dict[int, list[tuple[np.ndarray[Any, Any], int]]] = {SHORT: [], WINDOW: []}
    for doc in docs:
        at = 0
        while at == 0 or at + CONTEXT + 1 < len(doc):
            ids = doc[at : at + WINDOW + 1]
            if len(ids) > 1:
                out[SHORT if len(ids) <= SHORT + 1 else WINDOW].append((ids, CONTEXT if at else 0))
            at += WINDOW - CONTEXT
    return out


def token_nats(model: Model, rows: list[np.ndarray[Any, Any]], length: int) -> tuple[Tensor, list[Tensor]]:
    """Nats of every prediction f32 [B, length], what lies past a row's end included, and loads by layer."""
    ids = torch.full((max(len(rows), CELLS // length), length + 1), model.config.pad_token_id)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
    hidden, run = model.trunk(ids[:, :-1], sparse=True)
    target = ids[:, 1:].reshape(-1)
    nats = torch.cat(
        [
            torch.nn.functional.cross_entropy(
                model.logits(hidden[a : a + 2048]), target[a : a + 2048], reduction="none"
            )
            for a in range(0, len(target), 2048)
        ]
    )
    return nats.view(len(ids), -1)[: len(rows)], run.loads


def bits_per_byte(model: Model, work: Path, domain: str) -> dict[str, float]:
    total, count = 0.0, 0
    for length, rows in windows(documents(work, domain)).items():
        step = max(1, CELLS // length)
        for lo in range(0, len(rows), step):
            some = rows[lo : lo + step]
            nats, _ = token_nats(model, [ids for ids, _ in some], length)
            for row, (ids, skip) in zip(nats, some):
                total += float(row[skip : len(ids) - 1].sum())
                count += len(ids) - 1 - skip
    return {"bits_per_byte": total / math.log(2) / read_index(work)[f"{domain}.judge"]["bytes"], "tokens": count}


def by_position(model: Model, work: Path, domain: str, most: int = 6) -> dict[str, float] | None:
    """Nats a token by position in long documents; None when there is none that long."""
    docs = [d[: LONG + 1] for d in documents(work, domain) if len(d) > LONG][:most]
    if not docs:
        return None
    nats = torch.cat([token_nats(model, [d], LONG)[0] for d in docs])
    return {f"{a}-{b}": float(nats[:, a:b].mean()) for a, b in itertools.pairwise(BUCKETS)} | {"documents": len(docs)}


def router_load(model: Model, work: Path) -> list[dict[str, float]]:
    """Busiest and idlest expert by layer, relative to an even share, on as much text of every claimed domain."""
    sums: list[Tensor] = []
    for domain in CLAIMED:
        ids = held_out(work, domain, "judge", CELLS // SHORT, SHORT)
        _, loads = token_nats(model, list(ids), SHORT)
        shares = [load / load.sum() for load in loads]
        sums = [a + b for a, b in zip(sums, shares)] if sums else shares
    return [{"busiest": float(s.max() / s.mean()), "idlest": float(s.min() / s.mean())} for s in sums]


def drafts(draft: Draft, work: Path) -> dict[str, Any]:
    """By domain and over all: accepted at temperature 1, agreement and overlap by row; and the confidences' worth."""
    block = draft.trunk.config.dspark_block_size
    out: dict[str, Any] = {}
    overlaps, sure = [], []
    for domain in JUDGED:
        ids = torch.from_numpy(held_out(work, domain, "judge", CELLS // SHORT, SHORT))
        anchors = torch.arange(FIRST_ANCHOR, SHORT - block, block)[:ANCHORS]
        _, overlap, agree, confidence, _ = draft.rounds(ids, anchors)
        o, a = overlap.view(-1, block), agree.view(-1, block).float()
        out[domain] = {
            "accepted": float(o.cumprod(1).sum(1).mean()),
            "greedy_run": float(a.cumprod(1).sum(1).mean()),
            "overlap": [round(float(v), 4) for v in o.mean(0)],
            "agreement": [round(float(v), 4) for v in a.mean(0)],
        }
        overlaps.append(overlap)
        sure.append(torch.sigmoid(confidence))
    o, s = torch.cat(overlaps), torch.cat(sure)
    order = s.argsort()
    bins = [{"said": float(s[b].mean()), "was": float(o[b].mean())} for b in order.chunk(LEVELS)]
    correlation = float(torch.corrcoef(torch.stack([o, s]))[0, 1])
    return {"domains": out, "confidence": {"correlation": correlation, "bins": bins}}


PARTS = ("trunk", "drafts")


def evaluate(folder: Path, work: Path, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """The figures of a checkpoint, of the parts asked for.

    Raises:
        FileFormatError: the checkpoint or the token files cannot be read, or the trigrams are not there.
    """
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
    model, stages = load(folder)
    result: dict[str, Any] = {}
    with torch.no_grad():
        if "trunk" in parts:
            result |= _trunk(model, work)
        if "drafts" in parts and stages:
            draft = Draft(work, model)
            for name, p in draft.weights().items():
                p.copy_(stages[name])
            result["drafts"] = drafts(draft, work)
            for domain, d in result["drafts"]["domains"].items():
                print(f"{domain:10} accepted {d['accepted']:.2f}, first agrees {d['agreement'][0]:.3f}", flush=True)
            print(f"confidence: {result['drafts']['confidence']}", flush=True)
    return result


def _trunk(model: Model, work: Path) -> dict[str, Any]:
    try:
        trigram = json.loads((work / "ngram.json").read_text())["bits_per_byte"]
    except (OSError, ValueError, KeyError) as e:
        raise FileFormatError(f"{work / 'ngram.json'}: cannot be read ({e}); run train.ngram first") from e
    result: dict[str, Any] = {"bits_per_byte": {}, "by_position": {}}
    for domain in (*DOMAINS, UNSEEN, DIALOGUES):
        row = bits_per_byte(model, work, domain)
        base = trigram.get(domain, {})
        row |= {f"trigram_{k}": base[k] for k in ("own", "pooled") if base.get(k) is not None}
        result["bits_per_byte"][domain] = row
        own = base.get("own")
        note = f" trigram {own:.3f} ratio {row['bits_per_byte'] / own:.3f}" if own else ""
        print(f"{domain:10} {row['bits_per_byte']:.3f} bits/byte{note}", flush=True)
        positions = by_position(model, work, domain)
        if positions:
            result["by_position"][domain] = positions
            print(f"{'':10} nats a token by position: {positions}", flush=True)
    result["router"] = router_load(model, work)
    print("router, busiest by layer: " + " ".join(f"{r['busiest']:.2f}" for r in result["router"]), flush=True)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train.evaluate", description=__doc__.split("\n\n")[0])
    parser.add_argument("-m", "--model", type=Path, required=True, help="checkpoint folder in the released layout")
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    parser.add_argument("-o", "--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--part", choices=PARTS, help="only this part; FILE keeps what it has of the other")
    args = parser.parse_args(argv)
    try:
        result = evaluate(args.model, args.work, (args.part,) if args.part else PARTS)
        if args.output:
            if args.part and args.output.exists():
                result = json.loads(args.output.read_text()) | result
            replace_file(args.output, json.dumps(result, indent=1).encode() + b"\n")
    except Ds4Error as e:
        print(f"evaluate: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
