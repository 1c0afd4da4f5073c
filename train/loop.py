"""The training loop: two processes with one thread each on one set of weights in shared memory.

Two single-threaded processes are about twice as fast on two cores as one process with two threads. Each computes the
gradient of its own batch into its part of shared memory; then each updates the weights it owns with the mean of the
gradients, so the optimizer's work is divided too and nothing is sent. A step is: backward, barrier, norm, barrier,
update, barrier.

A run is a list of stages. Its checkpoint (`RUN/last.pt`, written beside and renamed) holds weights, optimizer and
position; the same command goes on from it, with the batches that an uninterrupted run would have seen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, multiprocessing, nn

from ds4.errors import ConfigError, Ds4Error, FileFormatError
from train.data import Batches
from train.optim import Optimizer, Rates, balance, state_names

WAIT = 1800.0  # seconds at a barrier: the first step compiles
EVAL_SECONDS = 300.0
PRINT_STEPS = 20
WARM_UP = 40  # steps
LEAST = 0.02  # of the rate, at the end


@dataclass(frozen=True)
class Stage:
    """tokens: of all processes. mix: domain -> share of the rows. start, end: where the schedule of the rate stands.

    The rate is constant while the schedule is below `hold`, then falls linearly to LEAST at 1.
    """

    name: str
    tokens: int
    batch: int  # rows a process
    length: int
    mix: Mapping[str, float]
    start: float
    end: float
    hold: float = 0.35
    least: float = LEAST


class Trainee(Protocol):
    """What a loop trains."""

    def weights(self) -> dict[str, nn.Parameter]:
        """Every weight in a fixed order, the router's biases included."""

    def trained(self, stage: Stage) -> set[str]:
        """Names that get a gradient in a stage."""

    def losses(self, ids: Tensor, stage: Stage) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
        """ids i64 [B, T + 1] -> loss, figures to log, and by router bias the tokens each expert got."""

    def figures(self) -> list[str]:
        """Names of what `measure` measures."""

    def measure(self, figure: str, stage: Stage) -> float:
        """One figure on held-out text."""


@dataclass(frozen=True)
class Run:
    """folder: of the checkpoint and the log. make: builds the trainee in a process; must be picklable."""

    folder: Path
    config: dict[str, Any]
    make: Callable[[], Trainee]
    stages: Sequence[Stage]
    work: Path
    seed: int
    rates: Rates
    groups: Mapping[str, int]
    processes: int = 2
    save_seconds: float = 120.0  # between checkpoints

    def steps(self, stage: Mapping[str, Any]) -> int:
        """How many a stage (as a dictionary) takes."""
        return -(-int(stage["tokens"]) // (self.processes * int(stage["batch"]) * int(stage["length"])))


class Shared:
    """Weights, gradients, optimizer state and small exchange areas in memory that all processes see."""

    def __init__(self, weights: Mapping[str, Tensor], processes: int) -> None:
        self.shapes = {n: w.shape for n, w in weights.items()}
        self.at: dict[str, tuple[int, int]] = {}
        end = 0
        for name, w in weights.items():
            self.at[name] = (end, end + w.numel())
            end += w.numel()
        self.values = torch.cat([w.detach().float().reshape(-1) for w in weights.values()]).share_memory_()
        self.grads = [torch.zeros(end).share_memory_() for _ in range(processes)]
        names = state_names(weights)
        self.state = {n: torch.zeros(self.shapes[n.split(":")[0]]).share_memory_() for n in names}
        self.loads = torch.zeros(processes, 4096).share_memory_()
        self.norms = torch.zeros(processes, dtype=torch.float64).share_memory_()
        self.figures = torch.zeros(256, dtype=torch.float64).share_memory_()
        self.losses = torch.zeros(processes).share_memory_()
        self.due = torch.zeros(2).share_memory_()  # is a measurement due, is a checkpoint

    def view(self, flat: Tensor, name: str) -> Tensor:
        lo, hi = self.at[name]
        return flat[lo:hi].view(self.shapes[name])

    def owners(self, processes: int) -> list[set[str]]:
        """Names by process, the optimizer's work about equal: a matrix costs its size times its short side."""
        cost = {n: float(s.numel()) * (min(s[-2:]) if len(s) > 1 else 1) for n, s in self.shapes.items()}
        out: list[set[str]] = [set() for _ in range(processes)]
        sums = [0.0] * processes
        for name in sorted(cost, key=lambda n: (-cost[n], n)):
            least = sums.index(min(sums))
            out[least].add(name)
            sums[least] += cost[name]
        return out


def rate(stage: Stage, done: float, steps: int) -> float:
    """The factor on the base rates; `done` in 0..1 of the stage, `steps` of the run for the warm-up."""
    at = stage.start + (stage.end - stage.start) * done
    fall = 1.0 if at < stage.hold else max(stage.least, 1 - (at - stage.hold) / (1 - stage.hold))
    return min(1.0, (steps + 1) / WARM_UP) * fall


def train(run: Run, first: Mapping[str, Tensor]) -> dict[str, Any]:
    """Run all stages that are not done; -> the checkpoint of the end. `first`: weights to start from.

    Raises:
        ConfigError: the folder's checkpoint is of another configuration or other stages.
        FileFormatError: it cannot be read, or there is too little disk for a checkpoint.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    last = run.folder / "last.pt"
    position = {"stage": 0, "step": 0, "steps": 0}
    shared = Shared(first, run.processes)
    need = 3 * 4 * shared.values.numel()
    free = os.statvfs(run.folder)
    if free.f_bavail * free.f_frsize < 2 * need:
        raise FileFormatError(f"{run.folder}: a checkpoint takes {need / 1e6:.0f} MB and needs twice that free")
    if last.exists():
        kept = load_checkpoint(last)
        plan = [asdict(s) for s in run.stages]
        position = kept["position"]
        last_stage = len(plan) - 1
        if position["stage"] > last_stage and plan[-1]["tokens"] > kept["stages"][-1]["tokens"]:
            # finished, but its last stage was given more tokens: it goes on where the longer schedule has that step
            position = {"stage": last_stage, "step": run.steps(kept["stages"][-1]), "steps": position["steps"]}
        done = position["stage"]
        if kept["config"] != run.config or kept["stages"][:done] != plan[:done]:
            raise ConfigError(f"{last} is of another configuration or plan; use another --run, or remove it")
        for name in shared.shapes:
            if name not in kept["weights"] or kept["weights"][name].shape != shared.shapes[name]:
                raise ConfigError(f"{last}: {name} is missing or of another shape; use another --run, or remove it")
            shared.view(shared.values, name).copy_(kept["weights"][name])
        for name, value in kept["optimizer"].items():
            shared.state[name].copy_(value)
        print(f"going on from {last}: {position}", flush=True)
    barrier = multiprocessing.get_context("spawn").Barrier(run.processes, timeout=WAIT)
    multiprocessing.spawn(_worker, (run, shared, barrier, position), nprocs=run.processes)
    return load_checkpoint(last)


def training_command(name: str, run: Callable[[], int]) -> int:
    """A command's exit code: an error and an interruption are one line each, and 1."""
    try:
        return run()
    except Ds4Error as e:
        print(f"{name}: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
    return 1


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Raises FileFormatError with the path when it is not a whole checkpoint."""
    try:
        kept: dict[str, Any] = torch.load(path, weights_only=True)
        kept["weights"], kept["config"]
    except Exception as e:  # torch raises half a dozen kinds for a damaged file
        raise FileFormatError(f"{path}: not a readable checkpoint ({type(e).__name__}: {e})") from e
    return kept


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as f:
        torch.save(content, f)
        f.flush()
        os.fsync(f.fileno())
    beside.replace(path)


def _worker(rank: int, run: Run, shared: Shared, barrier: Barrier, position: dict[str, int]) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
    trainee = run.make()
    for name, p in trainee.weights().items():
        p.data = shared.view(shared.values, name)
    _Worker(rank, run, shared, barrier, trainee, position).run_all()


class _Worker:
    """One process of the loop."""

    def __init__(
        self, rank: int, run: Run, shared: Shared, barrier: Barrier, trainee: Trainee, position: dict[str, int]
    ) -> None:
        self.rank, self.run, self.shared, self.barrier, self.trainee = rank, run, shared, barrier, trainee
        self.weights = trainee.weights()
        self.owned = shared.owners(run.processes)[rank]
        mine = {n: self.weights[n] for n in self.weights if n in self.owned}
        self.optimizer = Optimizer(
            mine.items(), run.rates, run.groups, {n: shared.state[n] for n in state_names(mine)}
        )
        self.optimizer.steps = position["steps"]
        self.position = dict(position)
        self.mean_loss = 0.0
        self.saved = self.measured = self.printed = time.monotonic()

    def run_all(self) -> None:
        for index in range(self.position["stage"], len(self.run.stages)):
            stage = self.run.stages[index]
            trained = self.trainee.trained(stage)
            for name, p in self.weights.items():
                p.requires_grad_(name in trained)
            total = self.run.steps(asdict(stage))
            batches = Batches(
                self.run.work, stage.mix, stage.batch, stage.length, self.run.seed * 1000 + index, self.rank
            )
            first = self.position["step"]
            self.printed = time.monotonic()
            while self.position["step"] < total:
                step = self.position["step"]
                figures, busiest = self._step(stage, torch.from_numpy(batches.batch(step)), step / total)
                self.position["step"] += 1
                self.position["steps"] += 1
                self._report(stage, total, first, figures, busiest)
            self.position["stage"], self.position["step"] = index + 1, 0
            self._measure(stage, total)
            self._save(force=True)

    def _step(self, stage: Stage, ids: Tensor, done: float) -> tuple[dict[str, float], float]:
        shared, rank = self.shared, self.rank
        loss, figures, loads = self.trainee.losses(ids, stage)
        loss.backward()
        shared.losses[rank] = loss.item()
        for name, p in self.weights.items():
            if p.grad is not None:
                shared.view(shared.grads[rank], name).copy_(p.grad)
                p.grad = None
        at = 0
        for load in loads.values():
            shared.loads[rank, at : at + len(load)] = load
            at += len(load)
        self.barrier.wait()
        for name in self.owned:
            p = self.weights[name]
            if p.requires_grad:
                p.grad = torch.stack([shared.view(g, name) for g in shared.grads]).mean(0)
        shared.norms[rank] = self.optimizer.squared_norm()
        busiest, at = 0.0, 0
        factor = rate(stage, done, self.position["steps"])
        for name, load in loads.items():
            both = shared.loads[:, at : at + len(load)].sum(0)
            at += len(load)
            busiest = max(busiest, float(both.max() / both.mean()))
            if name in self.owned:
                balance(self.weights[name].data, both, self.run.rates.bias * factor)
        self.barrier.wait()
        norm = float(shared.norms.sum()) ** 0.5
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradient is not finite at step {self.position['step']} of {stage.name}")
        self.optimizer.step(factor, norm)
        loss_now = float(shared.losses.mean())
        self.mean_loss = loss_now if not self.mean_loss else 0.95 * self.mean_loss + 0.05 * loss_now
        self.barrier.wait()
        return figures | {"rate": factor, "norm": norm}, busiest

    def _report(self, stage: Stage, total: int, first: int, figures: dict[str, float], busiest: float) -> None:
        step, now = self.position["step"], time.monotonic()
        if self.rank == 0 and step % PRINT_STEPS == 0:
            a_step = (now - self.printed) / max(1, min(PRINT_STEPS, step - first))
            self.printed = now
            tokens = self.run.processes * stage.batch * stage.length
            more = " ".join(f"{k} {v:.3f}" for k, v in figures.items())
            print(
                f"{stage.name} {step}/{total} loss {self.mean_loss:.3f} {more} busiest {busiest:.2f} "
                f"{tokens / a_step:.0f} tokens/s, {(total - step) * a_step / 60:.1f} min left",
                flush=True,
            )
            self._log({"stage": stage.name, "step": step, "loss": self.mean_loss, "busiest": busiest, **figures})
        if self.rank == 0:
            self.shared.due[0] = now - self.measured > EVAL_SECONDS
            self.shared.due[1] = now - self.saved > self.run.save_seconds
        self.barrier.wait()
        if self.shared.due[0]:
            self._measure(stage, total)
        if self.shared.due[1]:
            self._save()

    def _measure(self, stage: Stage, total: int) -> None:
        """Held-out figures, divided among the processes."""
        names = self.trainee.figures()
        for i in range(self.rank, len(names), self.run.processes):
            with torch.no_grad():
                self.shared.figures[i] = self.trainee.measure(names[i], stage)
        self.barrier.wait()
        self.measured = time.monotonic()
        if self.rank == 0:
            values = {n: round(float(v), 4) for n, v in zip(names, self.shared.figures)}
            print("held out: " + " ".join(f"{n} {v:.3f}" for n, v in values.items()), flush=True)
            self._log({"stage": stage.name, "step": self.position["step"], "held_out": values})
        self.barrier.wait()

    def _save(self, force: bool = False) -> None:
        if self.rank == 0:
            shared = self.shared
            save_checkpoint(
                self.run.folder / "last.pt",
                {
                    "config": self.run.config,
                    "weights": {n: shared.view(shared.values, n).clone() for n in shared.shapes},
                    "optimizer": shared.state,
                    "position": self.position,
                    "stages": [asdict(s) for s in self.run.stages],
                },
            )
        self.saved = time.monotonic()
        self.barrier.wait()

    def _log(self, row: dict[str, Any]) -> None:
        with (self.run.folder / "log.jsonl").open("a") as f:
            f.write(json.dumps({"time": int(time.time()), **row}) + "\n")
