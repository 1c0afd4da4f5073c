"""One night: the log's days, corrections, solves, a real forward, gates, and what is mounted in the morning.

    ask     requests of the days; corrections into decisions; with nothing to go by nothing happens
    points  what the base with its sidecar does today, on the path that requests take
    solve   every candidate that the method has; and once more without the day's own points, which then judge it
    judge   points, other positions, free answers, rulers; each by a real forward with the candidate mounted
    choose  of those that pass every gate one that was solved for the points before one that was not; of these the one
            with the most held-out points right; of equals the most trained points, then the highest Sigma-min on
            general text, then refit+margins before margins
    mount   nights/NAME, `current`, history, the server's reload; the others go to rejected/

A night that ends in any other way leaves `current` as it was, and a line in history with the reason.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from typing import Any

from ds4.base.reader import Base
from ds4.checkpoint.reader import Checkpoint
from ds4.corpus.domain import Domain
from ds4.errors import Ds4Error, UsageError
from ds4.model.tokenizer import Tokenizer
from ds4.posttrain.log import existing_folder
from ds4.posttrain.nights import NIGHTS
from ds4.server.request import Card
from ds4.teacher.source import CheckpointSource
from rulers.identity import model_fingerprint
from rulers.scores import Scores
from rulers.teacher_scores import teacher_scores
from rulers.text import Text
from solvers.nightly.candidates import Bench
from solvers.nightly.home import JOB, WORK, Home, errors
from solvers.nightly.inputs import Inputs, gather
from solvers.nightly.method import Solver, chains
from solvers.nightly.night import Bar, Night, Outcome, RulerText, Say
from solvers.nightly.publish import publish
from solvers.nightly.room import Lender, Room
from solvers.nightly.steps import Steps

SLICE = "judge"


def run_night(night: Night, solvers: Mapping[str, Solver], server: Lender | None, say: Say, bar: Bar) -> Outcome:
    """One night, whole; what an earlier run of the same night finished is not done again.

    Args:
        solvers: by name, those that the method needs.
        server: takes the new night, and lends its device where memory is short.
        bar: a bar for something that takes a while.

    Raises:
        UsageError: somebody else is at work in the folder, or what is asked for cannot be.
        Ds4Error: it failed; history has a line, and `current` is as it was. A run of the same night goes on.
    """
    if not night.home.exists():
        existing_folder(night.log)  # before anything is made
    home = Home.make(night.home)
    with home.locked(f"ds4 nightly run --day {night.day}"):
        try:
            outcome = _Run(home, night, dict(solvers), server, say, bar).run()
        except Exception as e:
            _failed(home, night, e, say)
            raise
        if outcome.event == "nothing to do":
            home.history.append({"event": outcome.event, "day": str(night.day), "reason": outcome.reason})
        return outcome


def _failed(home: Home, night: Night, error: Exception, say: Say) -> None:
    """A line in history; the error itself is what counts, if the disk has no room for the line."""
    reason = str(error) if isinstance(error, Ds4Error) else f"{type(error).__name__}: {error}"
    try:
        home.history.append({"event": "failed", "day": str(night.day), "reason": reason})
    except Ds4Error as e:
        say(f"history has no line of this: {e}")


class _Run:
    """The steps of one run, under the lock."""

    def __init__(
        self, home: Home, night: Night, solvers: dict[str, Solver], server: Lender | None, say: Say, bar: Bar
    ) -> None:
        self._home, self._night, self._solvers = home, night, solvers
        self._server, self._say, self._bar = server, say, bar

    def run(self) -> Outcome:
        night = self._night
        self._give_up_older()
        log = existing_folder(str(night.log))
        base = Base.open(night.base, night.engram_dir)
        tokenizer = Tokenizer.from_base(base.tokenizer_data(), base.config, str(base.path), base.folders)
        inputs = gather(
            log, night.day, night.n_days, night.corrections, tokenizer, base.config.max_position_embeddings
        )  # fmt: skip
        if not inputs.today:
            return Outcome("nothing to do", reason=f"{night.day}: no requests")
        wanted = chains(
            night.method, self._solvers, points=bool(inputs.found), teacher=night.teacher is not None
        )  # fmt: skip
        if not wanted:
            why = f"{inputs.why_no_points()}, and no original for a refit" if night.teacher is None else ""
            return Outcome("nothing to do", reason=f"{night.day}: {why or inputs.why_no_points()}")
        about = {
            "requests_sha256": inputs.sha256, "corrections": [[f["file"], f["sha256"]] for f in inputs.files],
        }  # fmt: skip
        head = json.loads(json.dumps(night.head(base, about, self._solvers)))  # as it reads back
        done = self._done(head)
        if done is not None:
            return done
        steps = Steps(self._home.work(str(night.day)), head, self._say)
        outcome = self._solve(base, tokenizer, inputs, wanted, steps, head)
        if outcome.event == "accepted" and self._server is not None:
            steps.do("reload", self._reload)
        steps.remove()
        return outcome

    def _solve(
        self, base: Base, tokenizer: Tokenizer, inputs: Inputs, wanted: Mapping[str, tuple[str, ...]], steps: Steps,
        head: Mapping[str, Any],
    ) -> Outcome:  # fmt: skip
        night = self._night
        originals = self._originals(head["model"])
        card = Card(night.base.stem, base.config, tokenizer, {})
        current = steps.do("mounted before", self._home.linked)
        mounted = None if current is None else self._home.night(current)
        with Room(
            night.open_engine, night.need(base), night.free, night.budget, self._server, night.wait_s, self._say
        ) as room:
            bench = Bench(
                night, steps, room, inputs, card, base.config.num_hidden_layers, head["model"], self._solvers,
                originals, mounted if mounted is not None and mounted.is_dir() else None, self._bar, self._say,
            )  # fmt: skip
            bench.start()
            candidates = [bench.candidate(name, chain) for name, chain in wanted.items()]
        if all(c.folder is None for c in candidates):
            why = "; ".join(f"{c.name}: {c.why_not}" for c in candidates)
            return Outcome("nothing to do", reason=f"{night.day}: {why}")
        return publish(self._home, bench, candidates, head)

    def _originals(self, model: str) -> dict[str, Scores]:
        """The original's logits of the rulers' texts, from the cache or computed, before any device is asked for."""
        night = self._night
        if night.teacher is None:
            return {}
        source = CheckpointSource(Checkpoint.open(night.teacher))
        theirs = model_fingerprint(source)
        if theirs != model:
            raise UsageError(
                f"{night.base} is of model {model}, {night.teacher} of model {theirs}: name the checkpoint that the "
                "base was made from (--teacher)"
            )
        tokenizer = Tokenizer.from_file(night.teacher / "tokenizer.json", source.config)
        return {t.domain: self._original(t, tokenizer, source.config.bos_token_id) for t in night.texts}

    def _original(self, t: RulerText, tokenizer: Tokenizer, bos: int) -> Scores:
        night = self._night
        assert night.teacher is not None
        domain = Domain.open(t.domain)
        documents = [d.text for d in domain.documents(SLICE)]
        text = Text.cut(documents, tokenizer.encode, bos, length=t.length, tokens=t.tokens)
        with self._bar(f"the original reads {domain.name}") as progress:
            return teacher_scores(
                night.teacher, text, domain=domain.name, split=SLICE, length=t.length, folder=night.cache / "teacher",
                say=self._say, progress=progress,
            )  # fmt: skip

    def _done(self, head: Mapping[str, Any]) -> Outcome | None:
        """The same night was solved and accepted before: nothing is made twice."""
        if (self._home.work(str(self._night.day)) / JOB).exists():
            return None  # under way: the folders may be there, and the last steps not
        for name in reversed(self._home.names(NIGHTS)):
            with contextlib.suppress(Ds4Error):
                if self._home.about(name).get("head") == head:
                    return Outcome("nothing to do", name, f"{self._night.day}: solved already, as {name}")
        return None

    def _give_up_older(self) -> None:
        """Nights of earlier days that were never finished: this one has their days too."""
        day = str(self._night.day)
        for path in sorted((self._home.path / WORK).iterdir()):
            if path.name < day:
                with errors(path):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                self._home.history.append({"event": "given up", "day": path.name, "reason": f"{day} begins"})

    def _reload(self) -> None:
        assert self._server is not None
        try:
            self._server.reload()
        except Ds4Error as e:
            raise Ds4Error(
                f"{self._home.current} is accepted and current, but the server has not mounted it: {e}; "
                "send it SIGHUP, or run this night again"
            ) from e
        self._home.history.append({"event": "reloaded", "day": str(self._night.day), "night": self._home.current})
