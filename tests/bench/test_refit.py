"""bench/refit.py at a small size: every text is read with and without, and a second run makes nothing anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.test_benches import run

pytestmark = pytest.mark.long


def test_refit(tmp_path: Path) -> None:
    argv = ["refit.py", "--domain", "code", "--days", "1", "--requests", "5", "--judge", "2", "--tokens", "600"]
    argv += ["--beside-tokens", "512", "--layers", "last", "--out", str(tmp_path / "bench")]
    code, out, text = run(*argv)
    assert code == 0 and set(out) == {"day after", "code", "general"}
    assert "layers have gains" in text and "+-" in text
    for figures in out.values():
        assert figures["sidecar"]["tokens"] > 0 and figures["difference"]["sigma_min"]["se"] >= 0
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "bench").rglob("*") if p.is_file()}
    assert run(*argv)[1] == out
    assert files == {p: p.stat().st_mtime_ns for p in files}
