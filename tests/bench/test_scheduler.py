"""The scheduler's bench ends with its JSON line; of its figures only those of simulated clocks are judged."""

from tests.bench.test_benches import run


def test_scheduler() -> None:
    code, out, text = run("scheduler.py", "--tokens", "1000", "--rounds", "200")
    assert code == 0 or out["overhead_us"] > 50, text  # a loaded machine may be slow, but must say so
    assert out["overhead_us"] > 0
    # a pass reads the more the more rows it has, and several tokens' worth of it once
    first, last = out["pass_ms"][0], out["pass_ms"][-1]
    assert out["pass_ms"] == sorted(out["pass_ms"]) and first < last < 3 * first
    assert out["draft_ms"] < first
    for row in out["simulated"]:
        best = max(row["plain"], *row["fixed"])
        assert 0.85 * best < row["scheduler"] < 1.5 * best, row
    gains = [row["over_plain"] for row in out["simulated"]]
    assert gains[0] > 0.97 and gains[-1] > 2
    assert all(row["over_plain"] > 0.97 for row in out["arithmetic_bound"])
