"""The teacher: the original in full precision, run over token ids.

Knows nothing of text. Refuses ids outside the vocabulary, more positions than the model's context, and
values that stop being finite, naming the layer where they did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.engram.hash import DEAD, EngramTables, hash_rows
from ds4.errors import CapacityError, Ds4Error, MissingTensorError, RequestError, UsageError
from ds4.teacher.attention import attention
from ds4.teacher.engram import engram
from ds4.teacher.hyper import collapse
from ds4.teacher.indexer import published_after
from ds4.teacher.layers import LayerWeights, block, enter
from ds4.teacher.moe import RouterError
from ds4.teacher.numerics import F32, I64, Mask, Numerics
from ds4.teacher.source import Source
from ds4.teacher.state import Call, State
from ds4.teacher.stream import Stream

INDEX_KEYS = ("owner", "released")
Progress = Callable[[int, int], None]  # layer calls done, layer calls in all


@dataclass
class Trace:
    """What a forward call passes through; host arrays, filled by `Teacher.forward`, one entry a call."""

    streams_LRSD: list[F32] = field(default_factory=list)  # entering each layer before its engram; after the last
    hash_rows_RGN: list[I64] = field(default_factory=list)
    picks: list[dict[int, I64]] = field(default_factory=list)  # index source -> [R, k], -1 = none
    main_hidden: list[F32] = field(default_factory=list)  # [R, targets * D], model-text 5 and dspark 3


class Teacher:
    """Runs `source`'s model; one Teacher serves any number of `State`s.

    Args:
        arith: where values are rounded, one of `numerics.ARITHMETICS`.
        index_keys: `owner`, or `released`: the vendor's one slot of index keys on decode (model-text 6).
        xp: numpy or cupy.
    """

    def __init__(self, source: Source, arith: str = "none", index_keys: str = "owner", xp: ModuleType = np) -> None:
        if index_keys not in INDEX_KEYS:
            raise UsageError(f"index keys {index_keys!r} is unknown; choose one of {', '.join(INDEX_KEYS)}")
        self.config = source.config
        self.nm = Numerics.of(arith, xp)
        self.arith, self.index_keys = arith, index_keys
        self.tables: EngramTables | None = source.engram_tables() if self.config.engram_layer_ids else None
        self._source = source
        self.stream = Stream(self.nm, source)
        self._frequencies = [
            self.nm.to_xp(np.array(self.config.rope_frequencies(layer), dtype=np.float32))
            for layer in range(self.config.num_hidden_layers)
        ]

    def new_state(self) -> State:
        return State.empty(self.nm, self.config)

    def forward(
        self,
        state: State,
        ids: NDArray[Any],
        *,
        decode: bool = False,
        embeds_RD: F32 | None = None,
        image_R: Mask | None = None,
        trace: Trace | None = None,
        progress: Callable[[], None] | None = None,
    ) -> F32:
        """Logits f32 [R, V] of the next positions; `state` moves on.

        Args:
            ids: integers [R], R >= 1.
            decode: these rows are decoded, not prefilled. Differs only under released index keys. Several
                rows equal the same rows one at a time.
            embeds_RD: replaces the embeddings (image spans overwritten).
            image_R: positions of image spans: engram shut, history DEAD, experts chosen with bias_vl.

        Raises:
            RequestError: ids are empty, not integers, or outside the vocabulary.
            CapacityError: more positions than max_position_embeddings.
            Ds4Error: a value is not finite.
        """
        ids = check_ids(ids, self.config.vocab_size)
        n = len(ids)
        if state.position + n > self.config.max_position_embeddings:
            raise CapacityError(
                f"{state.position + n} tokens exceed the model's context of {self.config.max_position_embeddings}"
            )
        by_publisher = decode and self.index_keys == "released"
        if by_publisher and n > state.position + 1:
            # rows that a publisher has not made before this call would be scored: feed them one by one
            parts = [slice(i, i + 1) for i in range(n)]
        else:
            parts = [slice(0, n)]
        logits = []
        for part in parts:
            embeds = self.stream.embeds(ids[part]) if embeds_RD is None else self.nm.to_xp(embeds_RD[part])
            image = None if image_R is None else self.nm.to_xp(np.asarray(image_R, dtype=bool)[part])
            logits.append(self._call(state, ids[part], embeds, image, decode, trace, progress))
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def run(
        self,
        ids: NDArray[Any],
        decode_from: int | None = None,
        streams: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Prefill ids[:decode_from], decode the rest one at a time.

        Returns:
            logits_TV f32: row t predicts token t + 1. With `streams` also streams_LTSD f32 (L + 1 entries:
            entering each layer before its engram, then after the last) and hash_rows_TGN i64.
        """
        ids = check_ids(ids, self.config.vocab_size)
        n = len(ids)
        if n > self.config.max_position_embeddings:
            raise CapacityError(f"{n} tokens exceed the model's context of {self.config.max_position_embeddings}")
        split = n if decode_from is None else decode_from
        if not 0 <= split <= n:
            raise UsageError(f"decoding cannot start at position {split} of {n} tokens")
        calls = [slice(0, split)] * (split > 0) + [slice(i, i + 1) for i in range(split, n)]
        trace = Trace() if streams else None
        state = self.new_state()
        n_layers, done = self.config.num_hidden_layers, 0

        def step() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, len(calls) * n_layers)

        try:
            logits_TV = np.empty((n, self.config.vocab_size), dtype=np.float32)
        except MemoryError as e:
            n_bytes = 4 * n * self.config.vocab_size
            raise CapacityError(f"no memory for the logits of {n} tokens, {n_bytes:,} bytes; use fewer") from e
        for part in calls:
            decode = part.start >= split
            logits_TV[part] = self.forward(state, ids[part], decode=decode, trace=trace, progress=step)
        result: dict[str, NDArray[Any]] = {"logits_TV": logits_TV}
        if trace is not None:
            result["streams_LTSD"] = np.concatenate(trace.streams_LRSD, axis=1)
            result["hash_rows_TGN"] = np.concatenate(trace.hash_rows_RGN)
        return result

    def _call(
        self,
        state: State,
        ids: I64,
        embeds_RD: F32,
        image: Mask | None,
        decode: bool,
        trace: Trace | None,
        progress: Callable[[], None] | None,
    ) -> F32:
        nm, config, n = self.nm, self.config, len(ids)
        start = state.position
        positions = np.arange(start, start + n, dtype=np.int64)
        by_publisher = decode and self.index_keys == "released"
        call = Call(start, n, nm.to_xp(positions), image, by_publisher)
        if image is not None and not self._source.has("layers.0.ffn.gate.bias_vl"):
            raise MissingTensorError("these weights have no gate.bias_vl: they cannot take image positions")
        rows_RGN = self.hash_rows_of(state, ids, positions, image)
        n_used = config.num_experts_per_tok
        x_RSD, pre_RS = enter(nm, config, embeds_RD)
        streams, hidden = [], []
        for layer in range(config.num_hidden_layers):
            prefix = f"layers.{layer}"
            if trace is not None:
                streams.append(nm.to_host(x_RSD))
            w = self.stream.layer(prefix)
            rows_RE = self.engram_rows(layer, rows_RGN)
            if w.engram is not None and rows_RE is not None:
                x_RSD = engram(nm, config, w.engram, x_RSD, rows_RE, image)
            if trace is not None and layer in config.dspark_target_layer_ids:
                hidden.append(nm.to_host(nm.bf16(x_RSD.mean(axis=1))))
            attend = partial(self.attend, layer, w, call, state)
            load_expert = partial(self.stream.expert, prefix)
            try:
                x_RSD, pre_RS = block(nm, config, w, attend, load_expert, x_RSD, pre_RS, image, n_used)
            except RouterError as e:
                raise not_finite(f"the router of layer {layer}", start + e.row) from e
            del w, attend  # before the next layer's weights are made
            self._check_finite(x_RSD, layer, start)
            if progress is not None:
                progress()
        state.published = published_after(config, start, n, state.published, decode=decode)
        state.position = call.end
        if trace is not None:
            trace.streams_LRSD.append(np.stack([*streams, nm.to_host(x_RSD)]))
            trace.hash_rows_RGN.append(rows_RGN)
            trace.picks.append({layer: nm.to_host(p) for layer, p in call.all_picks.items()})
            trace.main_hidden.append(np.concatenate(hidden, axis=1) if hidden else np.zeros((n, 0), np.float32))
        return self.head(x_RSD, pre_RS, start)

    def attend(self, layer: int, w: LayerWeights, call: Call, state: State, x_RD: F32) -> F32:
        frequencies = self._frequencies[layer]
        return attention(self.nm, self.config, layer, w.attention, x_RD, call, state, frequencies)

    def hash_rows_of(self, state: State, ids: I64, positions: I64, image: Mask | None) -> I64:
        """Append to the history and look up the call's rows, i64 [R, G, columns]."""
        if self.tables is None:
            return np.zeros((len(ids), 0, self.config.engram_columns), np.int64)
        seen = self.tables.compress(ids)
        if image is not None:
            seen[self.nm.to_host(image)] = DEAD
        state.history = np.concatenate([state.history, seen])
        return hash_rows(self.tables, self.config, state.history, positions)

    def engram_rows(self, layer: int, rows_RGN: I64) -> F32 | None:
        slot = self.config.engram_slot(layer)
        if slot is None:
            return None
        rows = rows_RGN[:, slot]
        values = self._source.engram_rows(layer, rows.reshape(-1)).reshape(rows.shape[0], -1)
        placed: F32 = self.nm.to_xp(values)
        return placed

    def head(self, x_RSD: F32, pre_RS: F32, start: int) -> F32:
        nm = self.nm
        h = nm.rms_norm(collapse(nm, x_RSD, pre_RS), self.stream.dense("norm.weight"), self.config.rms_norm_eps)
        logits = np.empty((h.shape[0], self.config.vocab_size), dtype=np.float32)
        lo = 0
        for rows in self.stream.head_blocks():
            logits[:, lo : lo + rows.shape[0]] = nm.to_host(h @ rows.T)
            lo += rows.shape[0]
        finite_R = np.isfinite(logits).all(axis=1)
        if not finite_R.all():
            raise not_finite("the output head", start + int(finite_R.argmin()))
        return logits

    def _check_finite(self, x: F32, layer: int, start: int) -> None:
        finite_R = self.nm.xp.isfinite(x).reshape(x.shape[0], -1).all(axis=1)
        if not bool(finite_R.all()):
            raise not_finite(f"layer {layer}", start + int(self.nm.to_host(finite_R).argmin()))


def not_finite(where: str, position: int) -> Ds4Error:
    return Ds4Error(
        f"{where} gave a value that is not finite at position {position}; "
        "the weights are broken: `ds4 verify` names the tensor"
    )


def check_ids(ids: NDArray[Any], vocab_size: int) -> I64:
    """`ids` as i64 [T]; RequestError says what is wrong with them and where."""
    ids = np.asarray(ids)
    if ids.ndim != 1:
        raise RequestError(f"ids must be one list of integers, their shape is {list(ids.shape)}", "ids")
    if ids.size == 0:
        raise RequestError("ids are empty; there is no position to predict", "ids")
    if ids.dtype.kind not in "iu":
        raise RequestError(f"ids must be integers, they are {ids.dtype}", "ids")
    bad = (ids < 0) | (ids >= vocab_size)
    if bad.any():
        at = int(bad.argmax())
        raise RequestError(f"id {ids[at]} at position {at} is outside the vocabulary of {vocab_size}", "ids")
    return ids.astype(np.int64)
