"""What a request becomes inside the server, what the server asks of a model, and the limits it keeps.

Every API is read into one `Generation`; the worker and the text stream know nothing of any schema.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ds4.engine import Ask, Sampling
from ds4.engine.constraint import Constrained, TokenConstraint
from ds4.model.tokenizer import Tokenizer

Progress = Callable[[int, int], None]


class ServedConfig(Protocol):
    """The three numbers of a model that the server needs."""

    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def bos_token_id(self) -> int: ...
    @property
    def eos_token_id(self) -> int: ...


class ServedToken(Protocol):
    """A drawn token; see ds4.engine's Drawn."""

    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class ServedSession(Protocol):
    """One timeline; see ds4.engine.Session. `last`: what `next` returned, with its log-probabilities; `waiting`:
    tokens that `next` has ready.
    """

    @property
    def last(self) -> ServedToken | None: ...
    @property
    def waiting(self) -> int: ...

    def reading(self, tokens: Sequence[int]) -> Generator[tuple[int, int], None, object]: ...
    def constrain(self, constraint: TokenConstraint | None) -> None: ...
    def next(self, sampling: Sampling, *, left: int | None = None) -> int: ...
    def report(self) -> Mapping[str, object]: ...


class ServedModel(Protocol):
    """What a prompt is checked and tokenized with, and who answers it; an engine, or what is known without one."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> ServedConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def sidecars(self) -> Mapping[str, object]: ...


class ServedEngine(ServedModel, Protocol):
    """ds4.engine.Engine, or a stand-in of a dozen lines."""

    def session(self) -> ServedSession: ...
    def draw(self, asks: Sequence[Ask]) -> Sequence[Exception | None]: ...
    def drop_idle(self) -> None: ...
    def device_memory(self) -> tuple[int, int] | None: ...
    def states(self) -> tuple[int, int | None]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Card:
    """A `ServedModel` that holds no weights: requests are read by it while the device is lent."""

    name: str
    config: ServedConfig
    tokenizer: Tokenizer
    sidecars: Mapping[str, object]

    @staticmethod
    def of(engine: ServedModel) -> Card:
        return Card(engine.name, engine.config, engine.tokenizer, engine.sidecars)


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        declared: as the prompt has them.
        names: of a call, as it is written, to those that the client declared: name and namespace. A name that is not
            there was not declared.
        one: the answer ends with its first call.
    """

    declared: tuple[Mapping[str, object], ...]
    names: Mapping[str, tuple[str, str | None]]
    one: bool = False


@dataclass(frozen=True)
class Generation:
    """A checked request.

    Attributes:
        prompt_ids: at least one id, fewer than the context.
        max_tokens: at least 1; prompt and answer together fit the context.
        stops: texts that end the answer; looked for in content, not in reasoning.
        in_reasoning: the prompt ended inside a reasoning block.
        ends: tokens that end the answer as the end of sentence does: of a chat, those that would begin another turn.
        include_usage: a streamed answer ends with a chunk of usage counts.
        logprobs: each token's log-probabilities are told, and those of the `sampling.top` likeliest.
        tools: calls of them are taken out of the content; None: whatever is written is text.
        constraint: what the answer's tokens obey (ds4.constrain); None: nothing.
        prompt_chars: of a completion with `logprobs`: characters of the prompt, where its `text_offset` begins.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...] = ()
    in_reasoning: bool = False
    stream: bool = False
    include_usage: bool = False
    ends: frozenset[int] = frozenset()
    logprobs: bool = False
    tools: Tools | None = None
    constraint: Constrained | None = None
    prompt_chars: int = 0


@dataclass(frozen=True)
class Limits:
    """What a client may ask for before it is told no.

    Attributes:
        queue: requests that wait while one runs; one more gets a 503.
        body_bytes, body_s: size of a request, and seconds to send it in.
        stops, stop_chars: stop strings, and characters of one.
        outbox_chars: text that waits for a slow reader before its request is dropped; a log-probability counts as
            `outbox.LOGPROB_CHARS`.
        stall_s: seconds that one write may wait for a reader before its connection is cut.
        ping_s: seconds without an event before a stream says that it is alive.
        drain_s: seconds that running requests get after SIGTERM; then they are cancelled and answered so.
        close_s: seconds that those answers get to leave; then what is left is cut.
    """

    queue: int = 32
    body_bytes: int = 32 << 20
    body_s: float = 60.0
    stops: int = 16
    stop_chars: int = 256
    outbox_chars: int = 1 << 20
    stall_s: float = 30.0
    ping_s: float = 5.0
    drain_s: float = 30.0
    close_s: float = 5.0
