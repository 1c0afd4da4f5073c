"""`ds4 estimate` against what the engine then takes, and against the released model's table."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds4 import embedded
from ds4.base.plan import plan
from ds4.cli.embedded_base import embedded_base
from ds4.cli.main import run
from ds4.device.context import Context
from ds4.device.memory import Allocation
from ds4.engine import Ask, Engine, Sampling
from ds4.engine.estimate import estimate
from ds4.engine.lane import SessionOptions
from ds4.engine.layer import Numerics
from ds4.engine.sampling import Penalties
from ds4.model.config import ModelConfig
from ds4.server.warm import warm_up
from tests.cli.commands import refused
from tests.conftest import opened

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "tests" / "data" / "published"
SIDECAR = ROOT / "sidecars" / "code"
CHUNK = 128


class Counted:
    """Allocations of the process's device since it was made, as far as they live."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Allocation]] = []
        self.most = 0

    def add(self, made: Allocation) -> None:
        self._made.append(weakref.ref(made))
        self.most = max(self.most, self.held)

    @property
    def held(self) -> int:
        found = (ref() for ref in self._made)
        return sum(a.nbytes for a in found if a is not None and not a.freed)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    count, allocate = Counted(), Context.allocate

    def noting(self: Context, nbytes: int) -> Allocation:
        made = allocate(self, nbytes)
        count.add(made)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(Context, "allocate", noting)
        yield count


@pytest.mark.parametrize(
    ("drafts", "sidecar", "sessions", "prefill", "context"),
    [(2, True, 1, "replay", 1100), (0, False, 2, "full", 300)],
)
def test_the_estimate_is_what_an_engine_then_takes(
    drafts: int, sidecar: bool, sessions: int, prefill: str, context: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Within 2 %, the peak within 4 %: the rounds that a scheduler happens not to run, and when scratch grew."""
    base, device = embedded_base(), opened("fast", "greedy")
    zchain = SIDECAR if sidecar else None
    argv = ["estimate", "-m", base, "--context", context, "--chunk", CHUNK, "--sessions", sessions, "--json"]
    argv += ["--prefill", prefill, *(["--draft-k", drafts] if drafts else ["--no-dspark"])]
    argv += ["--zchain", zchain] if zchain else []
    assert run([str(a) for a in argv]) == 0
    told = json.loads(capsys.readouterr().out)
    gc.collect()
    device.sync()
    with counted(monkeypatch) as count:
        engine = Engine.open(
            base, engram_dir=embedded.checkpoint(), device=device, prefill=prefill, chunk=CHUNK,
            dspark=drafts > 0, draft_k=drafts or None, zchain=zchain,
        )  # fmt: skip
        placed = count.held
        assert placed == told["parts"]["weights"] + told["parts"]["sidecars"] + told["parts"]["draft_head"]
        warm_up(engine)
        held = [engine.session() for _ in range(sessions)]
        for session in held:
            session.sync([engine.config.bos_token_id] * (context - 12))
            for penalties in (Penalties(), Penalties(presence=0.1)):
                top = int(not penalties.neutral)
                for _ in range(4):
                    session.next(Sampling(1.0, top_p=0.9, seeded=False, penalties=penalties, top=top))
        if sessions > 1:
            sampling = Sampling(1.0, top_p=0.9, seeded=False)
            for _ in range(3):
                engine.draw([Ask(session, sampling) for session in held])
                for session in held:
                    session.next(sampling)
        gc.collect()
        device.sync()
        assert sum(session.lane.nbytes() for session in held) == told["parts"]["state"]
        assert engine.workspace.nbytes() == pytest.approx(told["parts"]["scratch"], rel=0.02)
        assert told["launches_a_step"] > 0
        assert count.held == pytest.approx(told["total"], rel=0.02)
        assert count.most == pytest.approx(told["peak"], rel=0.04)
        memory = engine.device_memory()
        assert memory is not None and 0 < memory[0] < memory[1] == told["device"]["memory"]
        engine.close()


def released(context: int, sessions: int = 1, block: int = 5, chunk: int = 512) -> dict[str, int]:
    config = ModelConfig.load(PUBLISHED)
    options = SessionOptions(Numerics("bf16", "fp4"), "replay", "owner", chunk, True)
    table = {t.name: t for t in plan(config)}
    info = opened("fast", "greedy").info
    found = estimate(config, table, info, options, context=context, sessions=sessions, block=block)
    return {**found.parts(), "total": found.total, "peak": found.peak}


def test_the_released_model_by_its_table() -> None:
    """Its base is 113.55 GB; what a forward pass does not read (n-gram tables) stays in the file, vectors grow."""
    small, large, two = released(4096), released(1 << 20), released(4096, sessions=2)
    table = {t.name: t.nbytes for t in plan(ModelConfig.load(PUBLISHED))}
    read = sum(n for name, n in table.items() if not name.startswith(("engram.", "v.")))
    assert small["weights"] + small["draft_head"] == pytest.approx(read, rel=0.005)
    assert large["state"] > 50 * small["state"]
    assert two["state"] == 2 * small["state"]
    assert small["scratch"] <= two["scratch"] < 1.03 * small["scratch"]  # shared passes have eight rows, not six
    wide = released(4096, block=0, chunk=2048)
    assert wide["draft_head"] == 0 and wide["scratch"] > 2 * small["scratch"]
    for found in (small, large, two):
        assert found["peak"] >= found["total"]
    rows = (1 << 20) // 2  # while the largest source grows, half of its rows are held twice
    assert large["peak"] - large["total"] > rows


def test_what_does_not_fit_ends_with_1_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(embedded_base())
    argv = ["estimate", "-m", base, "--context", "512", "--chunk", "64"]
    assert run([*argv, "--mem-budget-mb", "1"]) == 1
    assert "--mem-budget-mb allows 1: raise it" in capsys.readouterr().out
    monkeypatch.setattr("ds4.engine.budget.free_bytes", lambda device: 1 << 20)
    assert run(argv) == 1
    out = capsys.readouterr().out
    assert "1 MB are available" in out and "smaller --context" in out
    assert run([*argv, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["available"] == 1 << 20
    monkeypatch.setattr("ds4.engine.budget.free_bytes", lambda device: None)  # nobody can say: no reason to refuse
    assert run(argv) == 0


def test_the_command_places_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as count:
        run(["estimate", "-m", str(embedded_base()), "--context", "512", "--json"])
        assert count.most == 0


def test_what_it_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = embedded_base()
    assert "this model takes 1 to" in refused(capsys, 2, "estimate", "-m", base, "--context", 10**9)
    assert "--no-dspark makes no drafts" in refused(capsys, 2, "estimate", "-m", base, "--no-dspark", "--draft-k", 1)
    assert "gone.gguf" in refused(capsys, 1, "estimate", "-m", tmp_path / "gone.gguf")
    assert "not a regular file" in refused(capsys, 1, "estimate", "-m", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run(["estimate", "-m", str(base), "--sessions", "0"])
