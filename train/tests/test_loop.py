"""The loop: two processes are one run, an interrupted run goes on as if nothing had happened, bad folders refused."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds4.errors import ConfigError, FileFormatError
from train.loop import LEAST, WARM_UP, Run, Shared, Stage, load_checkpoint, rate, save_checkpoint, train
from train.optim import Rates, balance, orthogonal

VOCAB, WIDTH = 50, 8
STAGE = Stage("only", 2 * 3 * 10 * 12, 3, 10, {"code": 1.0, "law": 1.0}, 0.0, 1.0)  # 12 steps of 2 x 3 rows x 10


class Bigram:
    """A small thing to train: the next token from this one, through a matrix that Muon takes."""

    def __init__(self, fail_at: int | None, marker: Path) -> None:
        g = torch.Generator().manual_seed(0)
        self.fail_at, self.marker, self.calls = fail_at, marker, 0
        self.all = {
            "embed.weight": nn.Parameter(torch.randn(VOCAB, WIDTH, generator=g)),
            "attn.wkv.weight": nn.Parameter(torch.randn(WIDTH, WIDTH, generator=g)),
            "head.weight": nn.Parameter(torch.randn(VOCAB, WIDTH, generator=g)),
            "ffn.gate.bias": nn.Parameter(torch.zeros(4), requires_grad=False),
        }

    def weights(self) -> dict[str, nn.Parameter]:
        return self.all

    def trained(self, stage: Stage) -> set[str]:
        return {n for n in self.all if n != "ffn.gate.bias"}

    def losses(self, ids: Tensor, stage: Stage) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
        self.calls += 1
        if self.fail_at is not None and self.calls > self.fail_at and not self.marker.exists():
            self.marker.touch()
            raise RuntimeError("the power went")
        h = self.all["embed.weight"][ids[:, :-1]] @ self.all["attn.wkv.weight"].t()
        logits = h @ self.all["head.weight"].t()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss, {}, {"ffn.gate.bias": torch.tensor([3.0, 1.0, 2.0, 2.0])}

    def figures(self) -> list[str]:
        return ["constant"]

    def measure(self, figure: str, stage: Stage) -> float:
        return 7.0


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("work")
    (folder / "tokens").mkdir()
    rng = np.random.default_rng(0)
    for domain in ("code", "law"):
        rng.integers(3, VOCAB, 2000).astype("<u2").tofile(folder / "tokens" / f"{domain}.train.bin")
        np.arange(0, 2000, 100, dtype="<i8").tofile(folder / "tokens" / f"{domain}.train.starts.bin")
    return folder


def a_run(work: Path, name: str, fail_at: int | None = None) -> Run:
    make = functools.partial(Bigram, fail_at, work / f"{name}.failed")
    return Run(work / "runs" / name, {"a": 1}, make, [STAGE], work, 1, Rates(), {}, 2, save_seconds=0.0)


def first() -> dict[str, Tensor]:
    return {n: p.data for n, p in Bigram(None, Path()).weights().items()}


def test_interrupted_and_resumed_equals_uninterrupted(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(a_run(work, "whole"), first())
    broken = a_run(work, "broken", fail_at=5)
    with pytest.raises(Exception, match="the power went"):
        train(broken, first())
    stopped = load_checkpoint(broken.folder / "last.pt")
    assert 0 < stopped["position"]["step"] < 12 and stopped["position"]["stage"] == 0
    resumed = train(broken, first())
    assert resumed["position"] == whole["position"] == {"stage": 1, "step": 0, "steps": 12}
    for name, value in whole["weights"].items():
        assert torch.equal(value, resumed["weights"][name]), name
        assert not torch.equal(value, first()[name]), f"{name} was not trained"
    rows = [json.loads(line) for line in (broken.folder / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["held_out"] == {"constant": 7.0}
    assert not list(broken.folder.glob("*.part"))


def test_a_finished_run_is_not_trained_again(work: Path) -> None:
    before = load_checkpoint(work / "runs" / "whole" / "last.pt")
    after = train(a_run(work, "whole"), first())
    assert all(torch.equal(before["weights"][n], after["weights"][n]) for n in before["weights"])


def test_a_finished_run_goes_on_when_its_last_stage_gets_more_tokens(work: Path) -> None:
    train(a_run(work, "longer"), first())
    run = replace(a_run(work, "longer"), stages=[replace(STAGE, tokens=STAGE.tokens * 2)])
    assert train(run, first())["position"] == {"stage": 1, "step": 0, "steps": 24}


def test_a_checkpoint_of_something_else_is_refused(work: Path) -> None:
    run = a_run(work, "other")
    run.folder.mkdir(parents=True)
    plan = {"optimizer": {}, "position": {"stage": 0, "step": 1, "steps": 1}, "stages": [], "config": {"a": 1}}
    wide = first() | {"embed.weight": torch.zeros(VOCAB, WIDTH + 1)}
    save_checkpoint(run.folder / "last.pt", plan | {"weights": wide})
    with pytest.raises(ConfigError, match=r"embed\.weight is missing or of another shape"):
        train(run, first())
    with pytest.raises(ConfigError, match="another configuration"):
        train(replace(run, config={"a": 2}), first())
    (run.folder / "last.pt").write_bytes(b"half a file")
    with pytest.raises(FileFormatError, match="not a readable checkpoint"):
        train(run, first())


def test_every_weight_has_one_owner_and_the_work_is_even() -> None:
    weights = {f"layers.{i}.wq_a.weight": torch.zeros(32, 16) for i in range(7)} | {"norm.weight": torch.zeros(16)}
    shared = Shared(weights, 2)
    a, b = shared.owners(2)
    assert a | b == set(weights) and not a & b
    assert abs(len(a) - len(b)) <= 1


def test_the_rate_warms_up_holds_and_falls() -> None:
    assert rate(STAGE, 0.0, 0) == pytest.approx(1 / WARM_UP)
    assert rate(STAGE, 0.3, 1000) == 1.0
    assert rate(STAGE, 0.675, 1000) == pytest.approx(0.5)
    assert rate(STAGE, 1.0, 1000) == LEAST


def test_orthogonal_brings_singular_values_near_one() -> None:
    for shape in ((24, 96), (96, 24), (3, 16, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.6 and values.max() < 1.3


def test_balance_moves_against_the_load() -> None:
    bias = torch.zeros(3)
    balance(bias, torch.tensor([9.0, 3.0, 0.0]), 0.1)
    assert torch.allclose(bias, torch.tensor([-0.1, 0.1, 0.1]))
