"""sample.cu: the truncated sets against float64, the draws against exact probabilities, ties, bad rows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from ds4.device import Device
from ds4.device.kernels.sample import SAMPLE, SAMPLE_SMALL
from ds4.engine.ops.sample import DRAFT_STREAM, pack_params, sample


def kept_set(logits: NDArray[np.float32], T: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Largest first, lowest id on ties; top_k, then top_p of what is left, then min_p of the likeliest."""
    z = logits.astype(float) / T
    order = sorted(range(len(z)), key=lambda v: (-z[v], v))
    if top_k:
        order = order[:top_k]
    p = np.exp(z[order] - z[order[0]])
    if top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(p), float(np.float32(top_p)) * p.sum() * (1 - 1e-12)) + 1)]
    return [v for v in order if np.exp(z[v] - z[order[0]]) >= min_p]


def draw(device: Device, logits, *, T=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, rows=1, first=0):
    """`rows` draws from the same logits at rising positions: tokens, log-probabilities, kept counts."""
    V = len(logits)
    out = device.empty((rows, 4), "i32")
    params = device.upload(pack_params(rows, T, top_k, top_p, min_p, seed))
    pos = device.upload(np.arange(first, first + rows, dtype=np.int32))
    sample(device, out, device.upload(np.tile(np.asarray(logits, np.float32), (rows, 1))), params, pos, rows)
    got = device.download(out)
    assert got.shape == (rows, 4) and V
    return got[:, 0], got[:, 1].view(np.float32), got[:, 2]


def random_logits(V: int, seed: int, scale: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(V) * scale).astype(np.float32)


CASES = {
    "random": random_logits(331, 1),
    "ties everywhere": np.repeat(random_logits(33, 2), 10),
    "all equal": np.full(77, 0.25, np.float32),
    "one giant": np.where(np.arange(50) == 17, 80.0, 0.0).astype(np.float32),
    "minus infinity": np.where(np.arange(64) % 3 == 0, -np.inf, random_logits(64, 3)).astype(np.float32),
    "both zeros": np.where(np.arange(40) % 2 == 0, 0.0, -0.0).astype(np.float32),
}
SETTINGS = [
    {}, {"top_k": 1}, {"top_k": 7}, {"top_k": 1000}, {"top_p": 0.9}, {"top_p": 0.05}, {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["fast"], indirect=True)
def test_truncated_sets_are_exact(device: Device, name: str) -> None:
    logits = CASES[name]
    for settings in SETTINGS:
        for T in (0.7, 1.0):
            s = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
            want = kept_set(logits, T, s["top_k"], s["top_p"], s["min_p"])
            if s["top_p"] == 1.0 and s["min_p"] == 0.0 and not s["top_k"]:
                want = list(range(len(logits)))
            tokens, _, kept = draw(device, logits, T=T, rows=20, seed=5, **settings)
            assert set(tokens) <= set(want), settings
            assert set(kept) == {len(want)}, settings


@pytest.mark.parametrize("device", ["fast"], indirect=True)
@pytest.mark.parametrize("settings", [{"T": 0.7}, {"T": 1.0}, {"T": 1.5}, {"T": 1.0, "top_k": 9, "top_p": 0.8}])
def test_draws_follow_the_distribution(device: Device, settings: dict[str, float]) -> None:
    logits = random_logits(24, 11, 1.5)
    s = {"T": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    kept = kept_set(logits, s["T"], int(s["top_k"]), s["top_p"], s["min_p"])
    p = np.exp(logits[kept].astype(float) / s["T"])
    n = 4_000
    tokens, _, _ = draw(device, logits, rows=n, seed=123, **settings)
    counts = np.array([(tokens == v).sum() for v in kept])
    assert counts.sum() == n
    expected = p / p.sum() * n
    large = expected >= 5
    pooled = lambda x: np.append(x[large], x[~large].sum()) if (~large).any() else x  # noqa: E731
    assert chisquare(pooled(counts), pooled(expected)).pvalue > 1e-3
    wrong = np.exp(logits[kept].astype(float) / (s["T"] * 1.3))
    assert chisquare(pooled(counts), pooled(wrong / wrong.sum() * n)).pvalue < 1e-4


@pytest.mark.parametrize("device", ["greedy", "rising", "falling"], indirect=True)
def test_greedy_takes_the_lowest_of_equals(device: Device) -> None:
    logits = np.zeros(1500, np.float32)
    logits[[900, 40, 1100]] = 2.0
    tokens, logprob, kept = draw(device, logits, T=0.0)
    assert tokens[0] == 40 and kept[0] == 1
    assert logprob[0] == pytest.approx(-np.log(3 + 1497 * np.exp(-2.0)), abs=1e-5)
    tokens, _, kept = draw(device, logits, top_k=2, rows=2, seed=3)
    assert set(tokens) <= {40, 900} and kept[0] == 2


def test_noise_depends_on_seed_and_position_only(device: Device) -> None:
    logits = random_logits(200, 4)
    many, _, _ = draw(device, logits, rows=6, seed=9, first=10)
    for i in range(6):
        alone, _, _ = draw(device, logits, seed=9, first=10 + i)
        assert alone[0] == many[i]
    other, _, _ = draw(device, logits, rows=6, seed=9 + 2**40, first=10)
    assert not np.array_equal(many, other)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_a_distribution_are_refused(device: Device, bad: float) -> None:
    logits = random_logits(100, 6)
    logits[50] = bad
    assert draw(device, logits, T=1.0)[0][0] == -1
    assert draw(device, np.full(8, -np.inf, np.float32), T=1.0)[0][0] == -1


def test_the_number_of_threads_changes_nothing(device: Device) -> None:
    logits = device.upload(np.stack([random_logits(300, i) for i in range(4)]))
    pos = device.upload(np.arange(4, dtype=np.int32))
    for settings in ((0.0, 0, 1.0, 0.0), (0.8, 9, 0.9, 0.01)):
        params = device.upload(pack_params(4, *settings, 3))
        got = []
        for kernel in (SAMPLE, SAMPLE_SMALL):
            out = device.empty((4, 4), "i32")
            device.launch(kernel, out, None, logits, None, params, pos, 300, R=4, V=300)
            got.append(device.download(out))
        assert np.array_equal(*got)


@pytest.mark.parametrize("device", ["greedy", "rising", "falling"], indirect=True)
def test_raw_logits_give_the_log_probability_and_tokens_go_to_their_slots(device: Device) -> None:
    raw = np.stack([random_logits(150, i) for i in range(5)])
    chosen_from = raw + np.float32(2.5) * (np.arange(150) % 7 == 0).astype(np.float32)
    chosen_from[4, 3] = np.nan
    out, tokens = device.empty((5, 4), "i32"), device.empty((5,), "i32")
    params, pos = device.upload(pack_params(5, 1.0, 40, 0.9, 0.0, 8)), device.upload(np.arange(5, dtype=np.int32))
    sample(device, out, device.upload(chosen_from), params, pos, 5, raw=device.upload(raw), tokens=tokens)
    got, slots = device.download(out), device.download(tokens)
    plain = device.empty((5, 4), "i32")
    sample(device, plain, device.upload(chosen_from), params, pos, 5)
    assert np.array_equal(got[:, [0, 2, 3]], device.download(plain)[:, [0, 2, 3]])
    assert got[4, 0] == -1 and slots[4] == 0
    assert np.array_equal(got[:4, 0], slots[:4])
    exact = raw - np.log(np.exp(raw.astype(float)).sum(1, keepdims=True))
    assert got[:4, 1].view(np.float32) == pytest.approx(exact[np.arange(4), slots[:4]], abs=2e-6)


def test_streams_do_not_know_of_each_other(device: Device) -> None:
    logits, pos = np.zeros((200, 64), np.float32), device.upload(np.arange(200, dtype=np.int32))
    picks = []
    for stream in (0, DRAFT_STREAM):
        out = device.empty((200, 4), "i32")
        params = device.upload(pack_params(200, 1.0, 0, 1.0, 0.0, 5, stream))
        sample(device, out, device.upload(logits), params, pos, 200)
        picks.append(device.download(out)[:, 0])
    assert (picks[0] == picks[1]).sum() < 15  # one in 64 by chance


def test_so_cold_that_scores_overflow(device: Device) -> None:
    logits = random_logits(40, 2) * np.float32(1e35)
    assert draw(device, logits, T=1e-5)[0][0] == int(np.argmax(logits))


@pytest.mark.parametrize("device", ["fast"], indirect=True)
@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 900, "top_p": 0.6}])
@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "one giant"])
def test_released_vocabulary_truncates_exactly(device: Device, kind: str, settings: dict[str, float]) -> None:
    V = 129_280
    logits = {
        "random": random_logits(V, 7),
        "ties": np.round(random_logits(V, 7)),
        "all equal": np.full(V, -3.5, np.float32),
        "one giant": np.where(np.arange(V) == 99_999, 60.0, 0.0).astype(np.float32),
    }[kind]
    s = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    want = kept_set(logits, 1.0, int(s["top_k"]), s["top_p"], s["min_p"])
    tokens, _, kept = draw(device, logits, seed=1, **settings)
    assert kept[0] == len(want) and tokens[0] in set(want)


@pytest.mark.parametrize("device", ["fast"], indirect=True)
def test_released_vocabulary(device: Device) -> None:
    logits = random_logits(129_280, 7)
    tokens, logprob, kept = draw(device, logits, top_k=50, rows=2, seed=1)
    want = kept_set(logits, 1.0, 50, 1.0, 0.0)
    assert set(tokens) <= set(want) and kept[0] == 50
    exact = logits.astype(float) - np.log(np.exp(logits.astype(float)).sum())
    assert logprob[0] == pytest.approx(exact[tokens[0]], abs=1e-3)
