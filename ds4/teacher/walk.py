"""Many windows of text through the original at once, one layer after the other.

`Teacher.forward` takes one sequence through all layers, so a text of many windows would make every layer's weights
anew for each. A walk takes all windows through a layer before the next one: at released sizes weights are read once,
an expert is dequantised once a layer, and only the dense part of one layer and one expert are in memory beside the
streams (80 KB a token). Attention, engrams and hyper-connections run window by window; router and experts see the
rows of all windows together. Between two layers a walk can be put into a file and taken up again; the bytes that come
out are the same, and on one kind of CPU they do not depend on the number of its cores: BLAS has one thread here.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ds4.errors import CapacityError, Ds4Error
from ds4.model.config import ModelConfig
from ds4.teacher.engram import engram
from ds4.teacher.hyper import expand
from ds4.teacher.layers import enter, to_ffn
from ds4.teacher.moe import RouterError, expert, mix, route
from ds4.teacher.numerics import F32, I64
from ds4.teacher.run import Teacher, check_ids, not_finite
from ds4.teacher.state import Call
from ds4.teacher.tasks import Helpers

NO_PICKS = -1  # width of index lists that no layer has made yet


@dataclass(frozen=True)
class Moe:
    """What one layer's experts did for all T rows; host arrays.

    Attributes:
        input_TD, output_TD: f32, what router and experts read, and the block's output, shared expert included.
        picks_Tk: experts of each row, rising ids. mix_Tk: f32, their weights.
    """

    layer: int
    input_TD: F32
    output_TD: F32
    picks_Tk: I64
    mix_Tk: F32


class Walk:
    """Prefill of several windows. `layer` is the next one; windows stand one after the other in all arrays.

    Args:
        helpers: who else computes experts and logits, with the same bits; the teacher must be of their source.

    Raises:
        RequestError: ids are empty, not integers, or outside the vocabulary.
        CapacityError: a window is longer than the model's context, or there is no memory for the streams.
    """

    def __init__(self, teacher: Teacher, windows: Sequence[NDArray[Any]], helpers: Helpers | None = None) -> None:
        self._teacher, config, nm = teacher, teacher.config, teacher.nm
        self._helpers = helpers
        ids = [check_ids(window, config.vocab_size) for window in windows]
        longest = max(map(len, ids))
        if longest > config.max_position_embeddings:
            raise CapacityError(
                f"a window of {longest} tokens exceeds the model's context of {config.max_position_embeddings}"
            )
        ends = np.cumsum([len(i) for i in ids]).tolist()
        self.slices = tuple(slice(end - len(i), end) for i, end in zip(ids, ends))
        self.n, self.layer, self.n_layers = ends[-1], 0, config.num_hidden_layers
        self._states = [teacher.new_state() for _ in ids]
        positions = [np.arange(len(i), dtype=np.int64) for i in ids]
        self._calls = [Call(0, len(p), nm.to_xp(p), None, False) for p in positions]
        self._hash_rows = [
            teacher.hash_rows_of(state, i, p, None) for state, i, p in zip(self._states, ids, positions)
        ]
        try:
            self._x: F32 = nm.xp.empty((self.n, config.hc_mult, config.hidden_size), dtype=np.float32)
        except MemoryError as e:
            n_bytes = 4 * self.n * config.hc_mult * config.hidden_size
            raise CapacityError(f"no memory for the streams of {self.n} tokens, {n_bytes:,} bytes; use fewer") from e
        self._pre: F32 = nm.xp.empty((self.n, config.hc_mult), dtype=np.float32)
        for part, i in zip(self.slices, ids):
            self._x[part], self._pre[part] = enter(nm, config, teacher.stream.embeds(i))

    @property
    def done(self) -> bool:
        """All layers are behind; `logits` may be asked for."""
        return self.layer == self.n_layers

    def advance(self) -> Moe:
        """Run the next layer.

        Raises:
            Ds4Error: a value is not finite.
        """
        with threadpool_limits(1, user_api="blas"):  # sums of several threads depend on how many there are
            return self._advance()

    def _advance(self) -> Moe:
        teacher, config, nm = self._teacher, self._teacher.config, self._teacher.nm
        layer, prefix = self.layer, f"layers.{self.layer}"
        w = teacher.stream.layer(prefix)
        ways: list[tuple[F32, F32]] = []  # post and comb: how the output comes back into a window's streams
        z: F32 = nm.xp.empty((self.n, config.hidden_size), dtype=np.float32)
        for number, part in enumerate(self.slices):
            x, call = self._x[part], self._calls[number]
            rows_RE = teacher.engram_rows(layer, self._hash_rows[number])
            if w.engram is not None and rows_RE is not None:
                x = engram(nm, config, w.engram, x, rows_RE, None)
            attend = partial(teacher.attend, layer, w, call, self._states[number])
            f = to_ffn(nm, config, w, attend, x, self._pre[part])
            call.all_picks.clear()
            z[part], self._x[part], self._pre[part] = f.z_RD, f.x_RSD, f.pre_RS
            ways.append((f.post_RS, f.comb_RSS))
        try:
            picks, weights = route(nm, config, w.moe, z, None, config.num_experts_per_tok)
        except RouterError as e:
            raise self._broken(f"the router of layer {layer}", e.row) from e
        if self._helpers is None:
            y = mix(nm, config, w.moe, partial(teacher.stream.expert, prefix), z, picks, weights)
        else:
            routed = nm.to_xp(self._helpers.mix(prefix, *(nm.to_host(a) for a in (z, picks, weights))))
            y = nm.bf16(routed + expert(nm, w.moe.shared, z, config.swiglu_limit, None))
        for part, (post, comb) in zip(self.slices, ways):
            self._x[part] = expand(nm, y[part], self._x[part], post, comb)
            finite = nm.to_host(nm.xp.isfinite(self._x[part]).reshape(part.stop - part.start, -1).all(axis=1))
            if not finite.all():
                raise self._broken(f"layer {layer}", part.start + int(finite.argmin()))
        self.layer += 1
        return Moe(layer, *(nm.to_host(a) for a in (z, y, picks, weights)))

    def logits(self, window: int) -> F32:
        """Logits f32 [R, V] of a window's next tokens, when all layers are done.

        Raises:
            Ds4Error: a value is not finite.
        """
        assert self.done
        part = self.slices[window]
        with threadpool_limits(1, user_api="blas"):
            return self._teacher.head(self._x[part], self._pre[part], 0)

    def logits_of(self, windows: Sequence[int]) -> Iterator[F32]:
        """`logits` of several windows, in order; by the helpers, where there are some."""
        assert self.done
        if self._helpers is None:
            return map(self.logits, windows)
        nm = self._teacher.nm
        parts = [self.slices[w] for w in windows]
        return self._helpers.logits(
            [(w, nm.to_host(self._x[part]), nm.to_host(self._pre[part])) for w, part in zip(windows, parts)]
        )

    def _broken(self, where: str, row: int) -> Ds4Error:
        window = next(i for i, part in enumerate(self.slices) if part.start <= row < part.stop)
        return not_finite(f"{where}, in window {window},", row - self.slices[window].start)

    @property
    def saved_bytes(self) -> int:
        """About what `save` writes, at most."""
        c = self._teacher.config
        rows = sum(self.n // c.compress_ratios[k] * (c.head_dim + c.index_head_dim) for k in c.kv_source_layer_ids)
        picks = 2 * self.n * min(c.index_topk, max(call.n for call in self._calls))
        n_bytes: int = 4 * (self.n * c.hc_mult * (c.hidden_size + 1) + rows + picks) + (1 << 16)
        return n_bytes

    # -- between two layers --

    def save(self, path: Path, key: str) -> None:
        """Write the walk whole, beside its name and renamed; an earlier one under that name stays until then.

        Raises:
            CapacityError: the disk is full. Ds4Error: it cannot be written.
        """
        beside = path.with_name(path.name + ".new")
        try:
            with open(beside, "wb") as f:
                np.savez(f, allow_pickle=False, **self._arrays(key))
                f.flush()
                os.fsync(f.fileno())
            os.replace(beside, path)
        except OSError as e:
            beside.unlink(missing_ok=True)
            kind = CapacityError if e.errno == 28 else Ds4Error
            raise kind(f"{path}: cannot be written ({e.strerror or e})") from e

    def load(self, path: Path, key: str) -> bool:
        """Go on where a saved walk was. False, and nothing changed: no file, a broken one, or one of another key."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return False
        mine = self._arrays(key)
        if not arrays.keys() >= mine.keys() or arrays["key"].tobytes() != mine["key"].tobytes():
            return False
        assert self.layer == 0
        layer = int(arrays["layer"])
        nm, config = self._teacher.nm, self._teacher.config
        self._x, self._pre, self.layer = nm.to_xp(arrays["x"]), nm.to_xp(arrays["pre"]), layer
        for owner in _owners(config, layer):
            ends = np.cumsum([call.n // config.compress_ratios[owner] for call in self._calls])[:-1]
            compressed, keys = (np.split(arrays[f"{kind}_{owner}"], ends) for kind in ("compressed", "index_keys"))
            for state, rows, index_keys in zip(self._states, compressed, keys):
                own = state.layers[owner]
                assert own.compressed is not None and own.index_keys is not None
                own.compressed.append(nm.to_xp(rows))
                own.index_keys.append(nm.to_xp(index_keys))
        for call, picks, candidates in zip(
            self._calls, self._unpack(arrays, "picks"), self._unpack(arrays, "candidates")
        ):
            call.picks, call.candidates = picks, candidates
        return True

    def _arrays(self, key: str) -> dict[str, NDArray[Any]]:
        nm, config = self._teacher.nm, self._teacher.config
        out: dict[str, NDArray[Any]] = {
            "key": np.frombuffer(key.encode(), np.uint8),
            "layer": np.array(self.layer),
            "x": nm.to_host(self._x),
            "pre": nm.to_host(self._pre),
        }
        for owner in _owners(config, self.layer):
            own = [state.layers[owner] for state in self._states]
            out[f"compressed_{owner}"] = np.concatenate([nm.to_host(s.compressed.view) for s in own if s.compressed])
            out[f"index_keys_{owner}"] = np.concatenate([nm.to_host(s.index_keys.view) for s in own if s.index_keys])
        for name in ("picks", "candidates"):
            lists = [getattr(call, name) for call in self._calls]
            out[f"{name}_width"] = np.array([NO_PICKS if a is None else a.shape[1] for a in lists])
            flat = [nm.to_host(a).reshape(-1) for a in lists if a is not None]
            out[name] = np.concatenate(flat) if flat else np.zeros(0, np.int64)
        return out

    def _unpack(self, arrays: dict[str, NDArray[Any]], name: str) -> list[Any]:
        """Each window's [R, width] array; None where no layer had made one."""
        out: list[Any] = []
        at = 0
        for call, width in zip(self._calls, arrays[f"{name}_width"].tolist()):
            if width == NO_PICKS:
                out.append(None)
                continue
            out.append(self._teacher.nm.to_xp(arrays[name][at : at + call.n * width].reshape(call.n, width).copy()))
            at += call.n * width
        return out


def _owners(config: ModelConfig, layer: int) -> list[int]:
    """Layers before `layer` whose compressed rows and index keys later ones read."""
    return [owner for owner in config.kv_source_layer_ids if owner < layer]
