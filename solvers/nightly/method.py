"""What a night needs of a solve, and in which orders solves are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ds4.engine import Engine
from ds4.errors import UsageError
from ds4.posttrain.log import Logged
from ds4.posttrain.points import Point

MARGINS, REFIT, BOTH, CARRY, BEST = "margins", "refit", "refit+margins", "carry", "best"
METHODS = (BEST, MARGINS, REFIT, BOTH, CARRY)
# candidate -> its solves, each mounted under the next
CHAINS: dict[str, tuple[str, ...]] = {
    BOTH: (REFIT, MARGINS), CARRY: (CARRY,), MARGINS: (MARGINS,), REFIT: (REFIT,),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One solve.

    Attributes:
        out: the post-training folder to make; a killed solve may find there, or beside it, what it left.
        zchain: the sidecar that it is solved on.
        under: a post-training folder that is mounted while it solves, and whose gains the new one goes on from.
        points: decisions that are to come out right; empty for a solve that asks for none.
        requests: of the night's days, oldest first.
        say: gets a line whenever what is done is saved; may raise.
    """

    out: Path
    zchain: Path | None
    under: Path | None
    points: Sequence[Point]
    requests: Sequence[Logged]
    say: Callable[[str], None]
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class Solved:
    """What came of it.

    Attributes:
        wrote: whether there is a folder; False: nothing that helps was found.
        real: a pair a point, in their order, of a solve that trains them: a token b, and logit a - logit b by the
            solve's own real forward; the night reads it again.
        correlation: of the margins that it predicts with those of its real forward, over all that it solved for or
            kept; None of a solve that predicts none.
        figures: JSON, for the report.
    """

    wrote: bool
    real: tuple[tuple[int, float], ...] | None
    correlation: float | None
    figures: Mapping[str, Any]


class Solver(Protocol):
    """One of the solves. `needs_points`, `needs_teacher`: it does nothing without."""

    name: str
    needs_points: bool
    needs_teacher: bool

    def about(self) -> Mapping[str, Any]:
        """What its bytes depend on beside the task: JSON."""
        ...

    def prepare(self, task: Task) -> None:
        """What takes no engine, however long it takes; kept, so that a second call finds it done."""
        ...

    def solve(self, engine: Engine, task: Task) -> Solved:
        """Make `task.out`. The engine has `task.zchain` mounted, and is left in any state."""
        ...


def chains(method: str, solvers: Mapping[str, Solver], *, points: bool, teacher: bool) -> dict[str, tuple[str, ...]]:
    """The candidates of a night: name -> its solves in order.

    Args:
        solvers: those that there are; one that solves against the original is none without it.
        points, teacher: whether there are any.

    Returns:
        Empty where the method has nothing to solve from.

    Raises:
        UsageError: the method needs the original, and none is named.
    """
    wanted = CHAINS if method == BEST else {method: CHAINS[method]}
    found = {}
    for name, chain in wanted.items():
        if any(s not in solvers or (solvers[s].needs_teacher and not teacher) for s in chain):
            if method != BEST:
                raise UsageError(f"--method {method} solves against the original: name its checkpoint (--teacher)")
            continue
        if any(solvers[s].needs_points for s in chain) and not points:
            continue
        found[name] = chain
    return found
