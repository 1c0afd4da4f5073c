"""bench/solver.py at a small size: what it checks holds, what it prints is there. No time is judged here."""

import pytest

from tests.bench.test_benches import run

SMALL = ("--experts", "16", "--width", "64", "--rows", "2048", "--picks", "3", "--workers", "2")


def test_solver() -> None:
    code, out, text = run("solver.py", *SMALL)
    assert code == 0 and out["missed"] == 0, text
    near = out["near"]
    assert near["settled_from_direct"] <= 1e-7  # 1e-5 is what fails the command
    assert 0 < near["three_from_settled"] < 0.01 and near["sweeps_to_1e-8"] > 3
    # the lattice costs something, rounding afterwards more; the ridge by own energy fits better and serves worse
    assert near["free_gain"] > near["lattice_gain"] > near["rounded_gain"] > 0.05
    assert near["own_energy_fitted"] > near["lattice_fitted"] and near["own_energy_gain"] < near["lattice_gain"]
    for name in ("recipe", "best"):
        assert 0 < out[name]["held_out_gain"] < 1 and out[name]["peak_bytes"] < 8e9
        assert name in text


@pytest.mark.long
def test_solver_text() -> None:
    """The embedded model's own rows: every rule takes error away on text that it did not see."""
    code, out, text = run("solver_text.py", "--domains", "code", "--fit", "700", "--judge", "400", "--rows", "512")
    assert code == 0, text
    by_rule = {at["rule"]: at for at in out["means"]}
    assert {"recipe", "best", "own energy"} <= set(by_rule) and all(at["rows"] == 512 for at in out["means"])
    assert all(0 < at[share] < 1 for at in out["means"] for share in ("held_out", "judge"))


def test_a_missed_reach_fails() -> None:
    code, out, text = run("solver.py", *SMALL, "--reach", "1e-9")
    assert code == 1 and out["missed"] == 2 and "missed: recipe" in text
