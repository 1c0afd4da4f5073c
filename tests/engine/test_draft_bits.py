"""The draft head's bits: what is done in two ways is the same; what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds4.checkpoint.reader import Checkpoint
from ds4.engine import draft_weights
from ds4.engine.draft import Drafter
from ds4.engine.draft_weights import place_checkpoint_draft
from ds4.engine.layer import Numerics
from ds4.engine.state import SLACK
from ds4.errors import Ds4Error, FileFormatError, MissingTensorError, UsageError
from tests.base.toys import small_checkpoint
from tests.engine.conftest import DATA
from tests.engine.draft_bench import DEFAULT, EXACT, Bench, Drawn, bench_of, gaussian_rows, live_keys, same


@pytest.mark.parametrize("numerics", [EXACT, DEFAULT], ids=["f32", "default"])
@pytest.mark.parametrize("name", ["oracle-a", "oracle-e"])
def test_several_rows_at_once_are_one_by_one(name: str, numerics: Numerics) -> None:
    """Whatever rows a pass had beyond the committed ones; over a wrapped ring."""
    bench = bench_of(name)
    main = gaussian_rows(bench.config, 101)
    one, many = bench.drafter(numerics), bench.drafter(numerics)
    for row in main:
        bench.commit(one, row[None])
    at = 0
    for n, pending in [(8, 8)] * 10 + [(1, 5), (5, 8), (8, 8), (3, 4), (4, 5)]:
        rows = np.concatenate([main[at : at + n], gaussian_rows(bench.config, pending - n, seed=at)])
        bench.device.copy(many.state.expect(at, pending), bench.rows(rows, numerics.act))
        many.commit(n)
        at += n
    assert at == len(main) and one.state.position == many.state.position == at
    assert live_keys(one) == live_keys(many)
    assert same(bench.draft(one, 3), bench.draft(many, 3))


@pytest.mark.parametrize("numerics", [EXACT, DEFAULT], ids=["f32", "default"])
def test_any_chunking_of_a_prefill_seeds_the_same(numerics: Numerics) -> None:
    """Chunks that no window can reach are passed over, whole or in part."""
    bench = bench_of("oracle-a")
    main, seen = gaussian_rows(bench.config, 200), []
    for chunk in (200, 64, 31, 7):
        drafter = bench.drafter(numerics)
        for at in range(0, 200, chunk):
            drafter.seed(bench.rows(main[at : at + chunk], numerics.act), at, 200)
        assert (drafter.state.position, drafter.state.first) == (200, 200 - bench.config.sliding_window - SLACK)
        drafter.state.rollback(200 - SLACK)  # a whole window is still there
        seen.append((live_keys(drafter), *bench.draft(drafter, 2)))
    assert len(seen[0][0][0]) > 0
    for other in seen[1:]:
        assert other[0] == seen[0][0] and same(other[1:], seen[0][1:])


def test_direct_launches_equal_capture_and_replays() -> None:
    bench = bench_of("oracle-e")
    main = gaussian_rows(bench.config, 20)
    direct, graph = bench.drafter(DEFAULT, graphs=False), bench.drafter(DEFAULT)
    for i in range(12):
        n = 1 + i % 2
        for drafter in (direct, graph):
            bench.commit(drafter, main[i : i + n], pending=3)
        assert same(bench.draft(direct, i), bench.draft(graph, i)), i
    assert (direct.captures, graph.captures) == (0, 3)  # a round, and commits of one and of two rows


def test_restored_in_mid_round_is_uninterrupted() -> None:
    """A snapshot between a pass and its commit holds the pass's main rows."""
    bench = bench_of("oracle-a")
    main = gaussian_rows(bench.config, 90)
    drafter = bench.drafter(DEFAULT)
    drafter.seed(bench.rows(main[:80], "bf16"), 0, 80)
    bench.device.copy(drafter.state.expect(80, 4), bench.rows(main[80:84], "bf16"))
    kept = drafter.state.snapshot()
    assert kept.nbytes == drafter.state.nbytes() - drafter.state.main.nbytes // 2

    def go_on(d: Drafter) -> Drawn:
        d.commit(3)
        return bench.draft(d, 11)

    want = go_on(drafter)
    keys = live_keys(drafter)
    bench.commit(drafter, main[84:90])
    bench.draft(drafter, 1)
    drafter.state.restore(kept)
    assert same(go_on(drafter), want) and live_keys(drafter) == keys
    fresh = bench.drafter(DEFAULT)
    fresh.state.restore(kept)
    assert same(go_on(fresh), want) and live_keys(fresh) == keys


@pytest.mark.parametrize("back", [1, 5, SLACK])
def test_rolled_back_is_uninterrupted(back: int) -> None:
    """Over a wrapped ring and other rows: then the true ones again."""
    bench = bench_of("oracle-a")
    main, other = gaussian_rows(bench.config, 120), gaussian_rows(bench.config, back, seed=2)
    plain, drafter = bench.drafter(), bench.drafter()
    for d in (plain, drafter):
        d.seed(bench.rows(main[:100]), 0, 100)
    bench.commit(plain, main[100:101])
    want = bench.draft(plain, 4)
    for i in range(0, back, 8):
        bench.commit(drafter, other[i : i + 8])
    drafter.state.rollback(100)
    bench.commit(drafter, main[100:101])
    assert same(bench.draft(drafter, 4), want)
    assert live_keys(drafter) == live_keys(plain)


def test_a_rollback_drops_pending_rows() -> None:
    bench = bench_of("oracle-a")
    drafter = bench.drafter()
    bench.commit(drafter, gaussian_rows(bench.config, 2))
    drafter.state.expect(2, 5)
    drafter.state.rollback(5)
    assert (drafter.state.position, drafter.state.pending) == (2, 3)
    drafter.state.rollback(1)
    assert (drafter.state.position, drafter.state.pending) == (1, 0)


def test_missing_keys_are_not_seen() -> None:
    """After passes that left no rows, or a bounded prefill, the window begins anew, as in an empty sequence."""
    bench = bench_of("oracle-a")
    main = gaussian_rows(bench.config, 3)
    skipped, gap, fresh = (bench.drafter() for _ in range(3))
    for drafter in (skipped, gap):
        bench.commit(drafter, gaussian_rows(bench.config, 8, seed=3))
    gap.seed(bench.rows(main), 30, 33)
    fresh.seed(bench.rows(main), 30, 33)
    bench.device.copy(skipped.state.expect(30, 3), bench.rows(main))
    skipped.commit(3)
    want = bench.draft(fresh, 6)
    for drafter in (skipped, gap):
        assert (drafter.state.first, drafter.state.position) == (30, 33)
        assert same(bench.draft(drafter, 6), want)
    gap.state.clear()
    assert (gap.state.position, gap.state.first) == (0, 0)


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("oracle-a")
    drafter = bench.drafter()
    with pytest.raises(Ds4Error, match="seed or commit first"):
        bench.draft(drafter, 1)
    with pytest.raises(Ds4Error, match="0 are pending"):
        drafter.commit(1)
    with pytest.raises(Ds4Error, match="1 to 8 rows, not 9"):
        drafter.state.expect(0, 9)
    drafter.seed(bench.rows(gaussian_rows(bench.config, 200)), 0, 200)
    with pytest.raises(Ds4Error, match="roll back before writing at 199"):
        drafter.seed(bench.rows(gaussian_rows(bench.config, 1)), 199, 200)
    with pytest.raises(Ds4Error, match=f"at most {SLACK}"):
        drafter.state.rollback(200 - SLACK - 1)
    drafter.state.rollback(200 - SLACK)
    with pytest.raises(Ds4Error, match=f"at most {SLACK} positions below 200"):
        drafter.state.rollback(200 - SLACK - 1)
    with pytest.raises(Ds4Error, match="another model's"):
        drafter.state.restore(bench_of("oracle-b").drafter().state.snapshot())
    with pytest.raises(UsageError, match="block is 9"):
        Bench(bench.device, replace(bench.config, dspark_block_size=9), bench.weights).drafter()
    folder, _ = small_checkpoint()
    with pytest.raises(MissingTensorError, match="no draft stages"):
        place_checkpoint_draft(Checkpoint.open(folder), bench.device)
    monkeypatch.setattr(draft_weights, "MAX_BITS", 10)  # fixtures are small enough for 13
    with pytest.raises(
        FileFormatError, match=r"mtp\.0 have \d+ different groups of 8 weights, one codebook holds 1024"
    ):
        place_checkpoint_draft(Checkpoint.open(DATA / "oracle-a"), bench.device)


def test_check_build_sees_nothing_wrong() -> None:
    """Seeding, commits, and rounds that run directly, captured and replayed, under bounds, race and NaN checks."""
    bench = bench_of("oracle-a", "check")
    drafter = bench.drafter(DEFAULT)
    main = gaussian_rows(bench.config, 12)
    drafter.seed(bench.rows(main[:3], "bf16"), 0, 3)
    for i in range(3):
        bench.commit(drafter, main[3 + 3 * i : 5 + 3 * i], pending=3)
        drafts, logits, confidence = bench.draft(drafter, i)
        assert np.isfinite(logits).all() and np.isfinite(confidence).all()
        assert logits.argmax(axis=1).tolist() == drafts
