"""What a night is asked to do, what it is of, and what it found on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from ds4.base.reader import Base
from ds4.device import Device
from ds4.engine import Engine
from ds4.engine.budget import free_bytes
from ds4.engine.weights import placed_bytes
from ds4.sidecar.files import GAIN_FP4, gain_bytes
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from ds4.teacher.source import BaseSource
from rulers.endings import PROMPTS
from rulers.identity import file_mark, model_fingerprint
from rulers.teacher_scores import weights_mark
from solvers.nightly.gates import Thresholds
from solvers.nightly.judge import POSITIONS
from solvers.nightly.method import BEST, Solver

Progress = Callable[[int, int], None]
Bar = Callable[[str], AbstractContextManager[Progress | None]]
Say = Callable[[str], None]
Event = Literal["accepted", "rejected", "nothing to do", "failed"]
STATE_BYTES = 256 << 20  # of a session's caches, captured graphs and a solve's small things


@dataclass(frozen=True)
class Options:
    """How the engine computes; the server's own, or what is judged is not what is served. See Engine.open."""

    activations: str = "bf16"
    kv: str = "fp4"
    prefill: str = "replay"
    index_keys: str = "owner"
    chunk: int = 512
    graphs: bool = True


@dataclass(frozen=True)
class RulerText:
    """A text to be read: a domain's name or folder, about `tokens` of it in windows of at most `length`."""

    domain: str
    tokens: int = 4096
    length: int = 512


@dataclass(frozen=True)
class Night:
    """What is asked for.

    Attributes:
        home: the folder of the nights.
        log: the log's folder; of its last `n_days` days up to `day`.
        corrections: files; None: corrections*.jsonl in `log`.
        base, engram_dir, zchain: the base, and the sidecar that is mounted on it.
        teacher: the original's checkpoint; None: what needs it is left out.
        method: one of method.METHODS.
        texts: for the rulers; general text first.
        prompts: answered freely at temperature 1.
        answer_limit: tokens of a freely drawn answer that has not ended by then.
        cache: where the original's logits are kept.
        budget: bytes beside the server; wait_s: of all waiting together.
    """

    home: Path
    log: Path
    day: date
    base: Path
    cache: Path
    n_days: int = 14
    corrections: tuple[Path, ...] | None = None
    engram_dir: Path | None = None
    zchain: Path | None = None
    teacher: Path | None = None
    method: str = BEST
    texts: tuple[RulerText, ...] = (RulerText("general"),)
    no_domain: str | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    options: Options = field(default_factory=Options)
    prompts: tuple[str, ...] = PROMPTS
    answer_limit: int = 2048
    budget: int | None = None
    wait_s: float = 3600.0

    def open_engine(self, progress: Progress | None = None) -> Engine:
        """The engine that judges and solves, the sidecar mounted, no post-training."""
        return Engine.open(
            self.base, engram_dir=self.engram_dir, zchain=self.zchain, progress=progress, **asdict(self.options)
        )

    def need(self, base: Base) -> int:
        """Bytes that the engine takes with a sidecar and a post-training folder on, and a solve's rows beside it."""
        c = base.config
        E, D, K = c.n_routed_experts, c.hidden_size, c.num_experts_per_tok
        sidecars = 2 * c.num_hidden_layers * gain_bytes(E, D, GAIN_FP4)
        rows = (
            3 * POSITIONS * K * D * 4 + 10 * E * D * 8
        )  # margin_rows.py: rows as they come and sorted; CG's vectors
        return placed_bytes(base) + sidecars + rows + STATE_BYTES

    def free(self) -> int | None:
        """Bytes that are free for it now."""
        return free_bytes(Device.open())

    def head(self, base: Base, inputs: Mapping[str, Any], solvers: Mapping[str, Solver]) -> dict[str, Any]:
        """What the night's bytes depend on; a killed night goes on if it is the same."""
        n_layers = base.config.num_hidden_layers
        return {
            "format": 1,
            "day": str(self.day),
            "days": self.n_days,
            "method": self.method,
            "base": f"{self.base.name} {file_mark(self.base)}",
            "model": model_fingerprint(BaseSource(base)),
            "zchain": None if self.zchain is None else self.zchain.resolve().name,
            "solved_on": format_fingerprint(*sidecar_fingerprint(self.zchain, n_layers)).strip(),
            "teacher": None
            if self.teacher is None
            else f"{self.teacher.resolve().name} {weights_mark(self.teacher)}",
            "options": asdict(self.options),
            "thresholds": self.thresholds.to_json(),
            "texts": [asdict(t) for t in self.texts],
            "prompts": list(self.prompts),
            "answer_limit": self.answer_limit,
            "solvers": {name: dict(s.about()) for name, s in sorted(solvers.items())},
            **inputs,
        }


@dataclass(frozen=True)
class Outcome:
    """How a night ended. `name`: of the folder that is mounted since; `reason`: why nothing is, in words."""

    event: Event
    name: str | None = None
    reason: str = ""
    report: Path | None = None

    @property
    def code(self) -> int:
        return 0 if self.event in ("accepted", "nothing to do") else 1
