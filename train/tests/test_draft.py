"""A training round of the draft stages equals the teacher's drafting round; the loss and its gradient are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds4.engram.tables import derive_tables
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from ds4.teacher.dspark import Drafter
from ds4.teacher.run import Teacher, Trace
from tests import toy
from train import vocabulary
from train.tests.memory_source import MemorySource
from train.weights import from_released, to_released

torch = pytest.importorskip("torch")
from train import draft as training  # noqa: E402  # needs torch
from train.model import Model  # noqa: E402

N = 192  # positions, three windows


def test_a_round_equals_the_teacher() -> None:
    text = toy.make_tokenizer()
    config = ModelConfig.from_json(vocabulary.make_config(text))
    state = from_released(config, toy.make_weights(config, 5))
    tables = derive_tables(config, Tokenizer.from_json(text))
    model = Model(config, tables, torch.float32)
    model.load_weights({n: torch.from_numpy(w) for n, w in state.items() if not n.startswith("mtp.")})
    stages = training.Stages(model)
    for name, p in stages.weights().items():
        p.data = torch.from_numpy(state[name])
    ids = np.random.default_rng(1).integers(0, config.vocab_size, N + 1)
    anchors = [2, 40, 63, 64, 150]  # before the window is full, at its border, beyond it
    with torch.no_grad():
        _, run = model.trunk(torch.from_numpy(ids[None, :-1]), sparse=True)
        taps = torch.cat([run.taps[i] for i in config.dspark_target_layer_ids], -1)
        normed, bare, markov, _ = stages.round(torch.from_numpy(ids[None]), taps, torch.tensor(anchors))
        base = (normed @ model.weights()["head.weight"].t()).view(len(anchors), config.dspark_block_size, -1)
        last = stages.stage(config.num_nextn_predict_layers - 1)
        both = torch.cat([bare, markov], -1) @ last.confidence_head.proj.weight[0]
    first_confidence = both.view(len(anchors), -1)[:, 0]

    teacher = Teacher(MemorySource(config, to_released(config, state), tables))
    trace = Trace()
    teacher.forward(teacher.new_state(), ids[:-1], trace=trace)
    main = trace.main_hidden[0]
    assert np.linalg.norm(taps.numpy() - main) <= 1e-4 * np.linalg.norm(main)
    for i, anchor in enumerate(anchors):
        drafter = Drafter(teacher)
        drafter.commit(main[: anchor + 1])
        want = drafter.draft(int(ids[anchor + 1]))
        error = np.linalg.norm(base[i].numpy() - want.base_BV, axis=1) / np.linalg.norm(want.base_BV, axis=1)
        assert error.max() <= 1e-4, f"anchor {anchor}: {error}"
        scale = np.abs(want.confidence_B).max()
        assert abs(float(first_confidence[i]) - want.confidence_B[0]) <= 1e-4 * scale


def test_the_loss_is_kl_and_overlap_with_its_own_gradient() -> None:
    g = torch.Generator().manual_seed(0)
    rows, width, rank, words = 7, 6, 3, 11

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    h, e, markov = random(rows, width), random(rows, rank), random(words, rank)
    head, target, weight = random(words, width), random(rows, width), torch.rand(rows, generator=g) + 0.1
    leaves = [t.clone().requires_grad_() for t in (h, e, markov)]
    loss, overlap, agree = training.DraftLoss.apply(*leaves, head, target, weight)
    loss.backward()
    plain = [t.clone().requires_grad_() for t in (h, e, markov)]
    p = torch.softmax(target @ head.t(), -1)
    q = torch.softmax(plain[0] @ head.t() + plain[1] @ plain[2].t(), -1)
    small = torch.minimum(p, q).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    want = ((kl + training.OVERLAP_WEIGHT * (1 - small)) * weight / weight.sum()).sum()
    want.backward()
    assert torch.allclose(loss, want, atol=1e-6)
    assert torch.allclose(overlap, small, atol=1e-6)
    assert torch.equal(agree, p.argmax(-1) == q.argmax(-1))
    for ours, theirs in zip(leaves, plain, strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_drafting_needs_a_finished_trunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert training.main(["--work", str(tmp_path), "--run", "none"]) == 1
    assert "no trained trunk; run train.train --run none first" in capsys.readouterr().err
