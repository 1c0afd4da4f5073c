"""`ds4 generate` (or just `ds4 -m BASE -p TEXT`): continue a prompt on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.cli.ids import check_length, model_ids
from ds4.cli.model_flags import add_model_flags, open_engine, progress_bar
from ds4.cli.report import Told, logprobs_json, print_logprobs, report_lines
from ds4.engine import Engine, Sampling
from ds4.engine.sampling import MOST_TOP, Penalties
from ds4.errors import FileFormatError, RequestError, UsageError
from ds4.model.chat import other_turns, render
from ds4.model.tokenizer import StreamDecoder
from ds4.teacher.files import load_ids


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "generate",
        help="answer a prompt (also: ds4 -m BASE -p TEXT)",
        description="Prefill a prompt and decode up to N tokens, printed as they come.",
    )
    add_model_flags(p, prefill="replay", drafts=True)
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("-p", "--prompt", metavar="TEXT", help="text; '-' reads standard input")
    what.add_argument("--ids", metavar="F", help="token ids: an .npy file, or a JSON list in a file")
    p.add_argument("--chat", action="store_true", help="wrap TEXT as a user's message in the chat format")
    p.add_argument("--thinking", action="store_true", help="with --chat: let the model think first")
    p.add_argument("-n", "--max-tokens", type=int, default=128, metavar="N", help="at most N tokens (default 128)")
    _add_sampling_flags(p)
    p.add_argument("--stats", action="store_true", help="say at the end, on stderr, what passes and drafts yielded")
    p.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")
    p.set_defaults(run=run)


def _add_sampling_flags(p: argparse.ArgumentParser) -> None:
    """How a token is chosen (docs/sampling.md), and what is told of it."""

    def number(flag: str, default: float, metavar: str, text: str) -> None:
        p.add_argument(flag, type=float, default=default, metavar=metavar, help=text)

    number("--temp", 1.0, "T", "temperature; 0 is greedy (default 1)")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest; 0: all")
    number("--top-p", 1.0, "P", "keep the likeliest mass P; 1: all")
    number("--min-p", 0.0, "P", "drop tokens below P of the likeliest")
    p.add_argument("--seed", type=int, metavar="S", help="the same seed draws the same tokens")
    number("--presence-penalty", 0.0, "X", "taken off the logits of tokens that the answer has (-2 to 2)")
    number("--frequency-penalty", 0.0, "X", "taken off them for each time that the answer has them (-2 to 2)")
    number("--repetition-penalty", 1.0, "X", "divides logits of tokens in prompt or answer (0.1 to 10; 1: off)")
    bias = p.add_argument("--logit-bias", type=_bias, action="append", default=[], metavar="ID=X")
    bias.help = "added to the logit of one token (-100 to 100); may be repeated"
    shown = p.add_argument("--logprobs", type=int, metavar="N")
    shown.help = "show each token's log-probability, and those of the N likeliest (0 to 20)"


def run(args: argparse.Namespace) -> int:
    if args.max_tokens < 0:
        raise UsageError(f"-n {args.max_tokens}: must be at least 0")
    if args.thinking and not args.chat:
        raise UsageError("--thinking belongs to --chat: a plain prompt has no reasoning part")
    if args.chat and args.prompt is None:
        raise UsageError("--chat needs -p TEXT: ids are given as they are")
    if args.logprobs is not None and not 0 <= args.logprobs <= MOST_TOP:
        raise UsageError(f"--logprobs {args.logprobs}: must be between 0 and {MOST_TOP}")
    sampling = _sampling(args)
    given = None if args.ids is None else _read_ids(args.ids)
    engine = open_engine(args)
    try:
        sampling.penalties.check_vocab(engine.config.vocab_size)
        ends = other_turns(engine.tokenizer) if args.chat else frozenset()
        return _generate(
            args, engine, sampling, _prompt_ids(args, given, engine), ends | {engine.config.eos_token_id}
        )
    finally:
        engine.close()


def _bias(text: str) -> tuple[int, float]:
    """ID=X; argparse names the flag and exits with 2."""
    token, _, value = text.partition("=")
    try:
        if not (token.isascii() and token.isdecimal()):
            raise ValueError
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=X, a token id and a number") from None


def _sampling(args: argparse.Namespace) -> Sampling:
    bias = dict(args.logit_bias)
    if len(bias) < len(args.logit_bias):
        raise UsageError("--logit-bias names a token twice")
    seed = args.seed if args.seed is not None else int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
    return Sampling(
        args.temp, args.top_k, args.top_p, args.min_p, seed, seeded=args.seed is not None,
        penalties=Penalties(
            args.presence_penalty, args.frequency_penalty, args.repetition_penalty, tuple(bias.items())
        ),
        top=args.logprobs or 0,
    )  # fmt: skip


def _generate(
    args: argparse.Namespace, engine: Engine, sampling: Sampling, prompt_ids: list[int], ends: frozenset[int]
) -> int:
    session = engine.session()
    started = time.monotonic()
    with progress_bar("reading the prompt") as progress:
        session.sync(prompt_ids, on_progress=progress)
    read = time.monotonic()
    decoder = StreamDecoder(engine.tokenizer)
    ids: list[int] = []
    text: list[str] = []
    told: list[Told] = []
    reason = "length"
    room = engine.config.max_position_embeddings - len(prompt_ids)
    most = min(args.max_tokens, room)
    while len(ids) < most:
        token = session.next(sampling, left=most - len(ids))
        ids.append(token)
        if args.logprobs is not None:
            told.append(Told(token, session.last.logprob, session.last.top))
        if token in ends:
            reason = "stop"
            break
        _emit(text, decoder.push(token), args.json)
    _emit(text, decoder.flush(), args.json)
    done = time.monotonic()
    stats = {
        "prompt_tokens": len(prompt_ids),
        "tokens": len(ids),
        "prefill_s": round(read - started, 4),
        "decode_s": round(done - read, 4),
        "device": engine.device.info.name,
        **session.counts,
        **session.report(),
    }
    if args.json:
        out = {"prompt_ids": prompt_ids, "ids": ids, "text": "".join(text), "finish_reason": reason, "stats": stats}
        if args.logprobs is not None:
            out["logprobs"] = logprobs_json(told, engine.tokenizer)
        print(json.dumps(out, ensure_ascii=False))
    else:
        print()
        if args.logprobs is not None:
            print_logprobs(told, engine.tokenizer)
        if sys.stderr.isatty():
            rate = len(ids) / max(done - read, 1e-9)
            print(f"[{len(prompt_ids)} tokens read, {len(ids)} written, {rate:.1f} tokens/s]", file=sys.stderr)
    if args.stats:
        for line in report_lines(session.report()):
            print(line, file=sys.stderr)
    return 0


def _emit(text: list[str], piece: str, quiet: bool) -> None:
    if piece:
        text.append(piece)
        if not quiet:
            print(piece, end="", flush=True)


def _prompt_ids(args: argparse.Namespace, given: NDArray[Any] | None, engine: Engine) -> list[int]:
    """Ids of the prompt: text is the user's, so it never becomes a control token; BOS stands in front."""
    config, tokenizer = engine.config, engine.tokenizer
    if given is not None:
        return [int(i) for i in model_ids(given, config, args.ids)]
    text = _text(args.prompt)
    if args.chat:
        segments = render([{"role": "user", "content": text}], thinking=args.thinking)
        ids = tokenizer.encode_segments(segments, spell_missing=True)
    else:
        ids = [config.bos_token_id, *tokenizer.encode(text)]
    check_length(len(ids), config)
    return ids


def _text(prompt: str) -> str:
    """Python keeps bytes that are no UTF-8 as lone surrogates, in arguments and on some standard inputs."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as e:
        raise RequestError(f"the prompt is not UTF-8: byte 0x{e.object[e.start]:02X} at {e.start}", "prompt") from e
    at = next((i for i, c in enumerate(text) if "\udc80" <= c <= "\udcff"), None)
    if at is not None:
        raise RequestError(
            f"the prompt is not UTF-8: byte 0x{ord(text[at]) - 0xDC00:02X} at character {at}", "prompt"
        )
    if not text:
        raise RequestError("the prompt is empty; give it with -p TEXT", "prompt")
    return text


def _read_ids(path: str) -> NDArray[Any]:
    """Ids of a file, not yet judged: `model_ids` does that."""
    if Path(path).suffix == ".npy":
        return load_ids(path)
    try:
        parsed = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise FileFormatError(f"{path}: neither an .npy file nor a JSON list of ids ({e})") from e
    if not isinstance(parsed, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in parsed):
        raise RequestError(f"{path}: must be a JSON list of integers", "ids")
    try:
        return np.asarray(parsed, np.int64)
    except OverflowError as e:
        raise RequestError(f"{path}: an id has more than 64 bits", "ids") from e
