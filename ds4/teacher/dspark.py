"""The draft head (dspark.md): one drafting round at temperature 0, in the specification's order and words.

Owns the rings of main-stream keys. The backbone's `Trace.main_hidden` rows are its input; only committed
positions may be given to `commit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ds4.errors import MissingTensorError
from ds4.teacher.attention import AttentionWeights, attend, project_out
from ds4.teacher.hyper import collapse
from ds4.teacher.layers import block, enter
from ds4.teacher.numerics import F32, I64
from ds4.teacher.run import Teacher


@dataclass(frozen=True)
class Round:
    """One round's outputs, host arrays. B = dspark_block_size."""

    drafts_B: I64  # for positions b + 2 ... b + 1 + B
    base_BV: F32  # logits before the Markov bias
    logits_BV: F32  # after it
    confidence_B: F32  # raw, no sigmoid


class Drafter:
    """Draft stages of one sequence, on the same weights and arithmetic as `teacher`."""

    def __init__(self, teacher: Teacher) -> None:
        self.config = teacher.config
        if not self.config.num_nextn_predict_layers:
            raise MissingTensorError("this model has no draft stages")
        self.nm, self._stream = teacher.nm, teacher.stream
        n_stages, first = self.config.num_nextn_predict_layers, self.config.num_hidden_layers
        self._last = f"mtp.{n_stages - 1}"
        self._frequencies: F32 = self.nm.to_xp(np.array(self.config.rope_frequencies(first), dtype=np.float32))
        self._rings: list[F32] = [self.nm.xp.empty((0, self.config.head_dim), dtype=np.float32)] * n_stages
        self.position = 0  # positions committed

    def commit(self, main_hidden_R: F32) -> None:
        """Write the next positions' main-stream keys into every stage's ring; f32 [R, targets * D]."""
        nm, eps = self.nm, self.config.rms_norm_eps
        mh = nm.to_xp(np.asarray(main_hidden_R, dtype=np.float32))
        x = nm.quantised_linear(mh, self._stream.dense("mtp.0.main_proj.weight"))
        x = nm.rms_norm(x, self._stream.dense("mtp.0.main_norm.weight"), eps)
        at = self.position + nm.xp.arange(x.shape[0], dtype=np.int64)
        for stage, ring in enumerate(self._rings):
            w = self._stream.layer(f"mtp.{stage}").attention
            keys = nm.xp.concatenate([ring, self._keys(w, x, at)])
            self._rings[stage] = keys[-self.config.sliding_window :].copy()
        self.position += x.shape[0]

    def draft(self, token: int) -> Round:
        """Drafts after `token`, the main model's choice for the first position it has not seen."""
        nm, config = self.nm, self.config
        n = config.dspark_block_size
        ids = np.array([token] + [config.dspark_noise_token_id] * (n - 1), dtype=np.int64)
        at = self.position + nm.xp.arange(n, dtype=np.int64)
        x, pre = enter(nm, config, self._stream.embeds(ids))
        for stage in range(config.num_nextn_predict_layers):
            prefix = f"mtp.{stage}"
            w = self._stream.layer(prefix)
            sublayer = partial(self._attention, stage, w.attention, at)
            load_expert = partial(self._stream.expert, prefix)
            x, pre = block(nm, config, w, sublayer, load_expert, x, pre, None, config.dspark_num_experts_per_tok)
            del w, sublayer
        last = collapse(nm, x, pre)
        normed = nm.rms_norm(last, self._stream.dense(f"{self._last}.norm.weight"), config.rms_norm_eps)
        base = nm.xp.concatenate([normed @ rows.T for rows in self._stream.head_blocks()], axis=1)
        return self._markov(token, nm.to_host(last), nm.to_host(base))

    def _markov(self, token: int, last_BD: F32, base_BV: F32) -> Round:
        """The sequential pass: each draft's logits get a bias from the token before it. Ties: lowest id."""
        head = self.nm.to_host(self._stream.dense(f"{self._last}.markov_head.head.weight"))
        proj = self.nm.to_host(self._stream.dense(f"{self._last}.confidence_head.proj.weight"))[0]
        logits, confidence, drafts = [], [], []
        for x, base in zip(last_BD, base_BV):
            e = self._stream.source.rows(f"{self._last}.markov_head.embed.weight", np.array([token]))[0]
            logits.append(base + e @ head.T)
            confidence.append(np.dot(proj, np.concatenate([x, e])))
            token = int(logits[-1].argmax())
            drafts.append(token)
        return Round(np.array(drafts, np.int64), base_BV, np.array(logits), np.array(confidence, np.float32))

    def _attention(self, stage: int, w: AttentionWeights, at: I64, x_BD: F32) -> F32:
        """Every row sees the whole ring (the anchor's window) and every draft row, later ones included."""
        nm, config = self.nm, self.config
        qr = nm.rms_norm(nm.quantised_linear(x_BD, w.wq_a), w.q_norm, config.rms_norm_eps)
        q = nm.quantised_linear(qr, w.wq_b).reshape(-1, config.num_attention_heads, config.head_dim)
        q = nm.rope(q, at, self._frequencies)
        keys = nm.xp.concatenate([self._rings[stage], self._keys(w, x_BD, at)])
        seen = nm.xp.ones((x_BD.shape[0], keys.shape[0]), dtype=bool)
        o = attend(nm, q, keys, seen, None, None, w.sink)
        return project_out(nm, config, w, nm.rope(o, at, self._frequencies, inverse=True))

    def _keys(self, w: AttentionWeights, x_RD: F32, at: I64) -> F32:
        nm = self.nm
        kv = nm.rms_norm(nm.quantised_linear(x_RD, w.wkv), w.kv_norm, self.config.rms_norm_eps)
        return nm.round_window(nm.rope(kv, at, self._frequencies))
