"""`ds4 estimate -m BASE`: the memory that a base, its sidecars and a number of sequences will take, before a load."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ds4.cli.model_flags import add_model_flags, at_least_1, base_of, check_draft_flags
from ds4.errors import UsageError

if TYPE_CHECKING:
    from ds4.device import Device
    from ds4.engine.estimate import Estimate

WHAT = {
    "weights": "weights as they are placed",
    "sidecars": "sidecars that are mounted",
    "draft_head": "the draft head",
    "state": "caches of the sequences",
    "steps": "logits, slots and what chooses tokens",
    "scratch": "temporaries of a pass",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "estimate",
        help="the memory that a model will take, before it is loaded",
        description="Run the engine on a device on paper and print the memory that it would take, against what there "
        "is now; reads headers only. Exit code 1: it does not fit.",
    )
    add_model_flags(p, prefill="replay", drafts=True)
    p.add_argument("--context", type=at_least_1, metavar="N", help="tokens a sequence (default: the model's most)")
    p.add_argument("--sessions", type=at_least_1, default=1, metavar="N", help="sequences kept (default 1)")
    p.add_argument("--json", action="store_true", help="print the figures as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ds4.device import Device

    device = Device.open()
    found = told(args, estimate_of(args, device), device)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0 if found["fits"] else 1


def estimate_of(args: argparse.Namespace, device: Device) -> Estimate:
    """What the engine of these flags would take of `device`. Without --context: at the model's most.

    Raises:
        UsageError: flags that contradict each other, or a context that the model has not.
        Ds4Error: the base or a sidecar cannot be loaded.
    """
    from ds4.engine.engine import draft_block
    from ds4.engine.estimate import estimate
    from ds4.engine.lane import SessionOptions
    from ds4.engine.layer import Numerics
    from ds4.engine.mount import Mounted
    from ds4.posttrain.nights import resolve

    check_draft_flags(args)
    base = base_of(args, with_shards=False)
    posttrain = None if args.posttrain is None else resolve(args.posttrain)
    mounted = None
    if args.zchain is not None or posttrain is not None:
        mounted = Mounted.open(base.config, args.zchain, posttrain)
    most = base.config.max_position_embeddings
    context = getattr(args, "context", None) or most
    if context > most:
        raise UsageError(f"--context {context}: this model takes 1 to {most} tokens")
    return estimate(
        base.config, base.tensors, device.info,
        SessionOptions(
            Numerics(args.activations, args.kv), args.prefill, args.index_keys, args.chunk, not args.no_graph
        ),
        context=context,
        sessions=getattr(args, "sessions", 1),
        block=draft_block(base.config, not args.no_dspark, args.dspark_block, args.draft_k),
        mounted=mounted,
    )  # fmt: skip


def told(args: argparse.Namespace, found: Estimate, device: Device) -> dict[str, Any]:
    """The estimate against this machine, for JSON.

    The memory that is available is asked for while this process runs, which is as large as an engine's without its
    model: what that takes is therefore out of the figure already.
    """
    from ds4.engine.budget import free_bytes

    available = free_bytes(device)
    budget = None if args.mem_budget_mb is None else args.mem_budget_mb << 20
    counted = found.weights + found.sidecars + found.draft_head + found.state  # as the engine counts for a budget
    problems = []
    if available is not None and found.peak > available:
        problems.append(
            f"{_mb(found.peak)} MB are needed, {_mb(available)} MB are available: end other programs, or take a "
            "smaller --context, fewer --sessions or a smaller base"
        )
    if budget is not None and counted > budget:
        problems.append(
            f"weights and caches take {_mb(counted)} MB, --mem-budget-mb allows {args.mem_budget_mb}: raise it, or "
            "take a smaller --context"
        )
    return {
        "model": Path(args.model).name,
        "context": found.context,
        "sessions": found.sessions,
        "parts": found.parts(),
        "total": found.total,
        "peak": found.peak,
        "launches_a_step": found.launches,
        "device": {"name": device.info.name, "unified": device.info.unified, "memory": device.info.memory},
        "available": available,
        "budget": budget,
        "fits": not problems,
        "problems": problems,
    }


def _mb(nbytes: int) -> str:
    return f"{-(-nbytes // (1 << 20)):,}"


def _print(found: dict[str, Any]) -> None:
    console = Console()
    many = f"{found['sessions']} sequence{'s' * (found['sessions'] != 1)}"
    table = Table("what", "MB", title=f"{found['model']}: {many} of {found['context']:,} tokens")
    table.columns[1].justify = "right"
    for name, nbytes in found["parts"].items():
        table.add_row(WHAT[name], _mb(nbytes))
    table.add_section()
    table.add_row("in all", _mb(found["total"]))
    table.add_row("at most, while a sequence grows", _mb(found["peak"]))
    available = found["available"]
    table.add_row(f"available on {found['device']['name']}", "unknown" if available is None else _mb(available))
    console.print(table)
    for problem in found["problems"]:
        console.print(f"does not fit: {problem}", soft_wrap=True)
