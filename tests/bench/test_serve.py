"""bench/serve.py runs server, bare engine and clients, and says what each saw. Figures are judged in the bench."""

import subprocess
import sys

import pytest

from tests.base.toys import toy_base, toy_dir
from tests.bench.test_benches import ROOT, run


@pytest.mark.long
def test_serve() -> None:
    base = ["-m", str(toy_base("oracle-e", bits=6)), "--engram-dir", str(toy_dir("oracle-e"))]
    few = ["--clients", "1", "3", "--requests", "4", "--tokens", "12", "--rounds", "2", "--longest", "40"]
    code, out, text = run("serve.py", *base, *few, "--long", "120", "--chunk", "16", "--most-overhead", "1e9")
    assert code == 0, text
    assert set(out["load"]) == {"1", "3"} and out["driver"] == "simt"
    for row in out["load"].values():
        assert 0 < row["first_p50_ms"] <= row["first_p95_ms"] and 0 <= row["between_p50_ms"] <= row["between_p95_ms"]
        assert row["tokens_per_s"] > 0 and 0 < row["evenness"] <= 1
    assert out["stall"]["most_chunks_between"] <= 2 and out["stall"]["chunks"] >= 1
    assert out["overhead"]["server_cpu_ms"] > 0 and out["overhead"]["bare_cpu_ms"] > 0
    assert set(out["shared"]) == {"1", "2", "4", "8"} and all(row["same"] for row in out["shared"].values())
    assert run("serve.py", *base, *few, "--only", "overhead", "--long", "40", "--most-overhead=-1e9")[0] == 1


def test_serve_says_what_is_wrong() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "serve.py"), "--clients", "9"], capture_output=True, text=True
    )
    assert ran.returncode == 2 and "clients at most 8" in ran.stderr
