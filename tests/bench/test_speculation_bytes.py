"""Bytes per emitted token at the released shapes, counted: the reach holds, and the parts say what they should."""

from __future__ import annotations

import os

import pytest

from tests.bench.test_benches import run

pytestmark = pytest.mark.skipif(os.environ.get("DS4_DRIVER") == "nvidia", reason="only the CPU driver counts")


@pytest.mark.long
def test_speculation_bytes() -> None:
    code, out, text = run("speculation_bytes.py", "--context", "255")
    assert code == 0 and 0.5 < out["over_plain"] <= 0.75, text
    assert [r["k"] for r in out["rounds"]] == [2, 3, 4, 5] and out["best_k"] == 2
    plain, block = out["plain"], out["rounds"][-1]
    for r in out["rounds"]:
        # each dense weight once a pass; experts as many as are distinct, codebooks once
        assert r["dense_over_plain"] == 1
        assert plain["experts"] < r["pass"]["experts"] <= block["pass"]["experts"]
        assert r["by_plan"] < r["over_plain"] < 1.1 * r["by_plan"]
        ratio = (r["pass"]["total"] + out["drafts"]["total"]) / 2.5 / plain["total"]
        assert r["over_plain"] == pytest.approx(ratio, abs=1e-3)
    # 26 distinct experts of 12 and 13 bits a layer against 6: codebooks are what does not grow
    assert 4.2 < block["pass"]["experts"] / plain["experts"] < 26 / 6
    assert f"above 0.75: k = {', '.join(str(r['k']) for r in out['rounds'] if r['over_plain'] > 0.75)}" in text


def test_a_reach_that_is_missed_is_an_exit_code() -> None:
    few = ("--context", "64", "--verify", "5", "--accepted", "4.5", "--most-bytes", "0.1")
    code, out, text = run("speculation_bytes.py", *few)
    assert code == 1 and out["over_plain"] > 0.1, text
    (block,) = out["rounds"]
    assert block["k"] == 5 and block["dense_over_plain"] == 1
    assert block["by_plan"] < block["over_plain"] < 1.1 * block["by_plan"]
    assert 4.2 < block["pass"]["experts"] / out["plain"]["experts"] < 26 / 6
