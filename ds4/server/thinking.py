"""Whether to think, how hard and how long: one answer from the many names that clients have for it.

Off unless something asks for it. A request may say it in `thinking` (true, false, {"type": "enabled", "adaptive" or
"disabled"}), `enable_thinking`, `think` (a boolean or an effort), `reasoning_effort` (a name, 1 to 100, or "none"),
and in `chat_template_kwargs`, where other servers look; places that contradict each other are refused. A suffix of
the model's name says it for clients that cannot send any of these; a field is stronger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds4.errors import RequestError
from ds4.model.chat import EFFORTS, resolve_effort
from ds4.server.fields import Fields

SWITCHES = ("thinking", "enable_thinking", "reasoning_effort")  # what chat_template_kwargs may hold
TYPES = {"enabled": True, "adaptive": True, "disabled": False}
# What other APIs' clients say beside the release's own names: medium as a revision of its template has it, the others
# half way to their neighbours.
OTHER_NAMES = {"minimal": 25, "medium": 62, "xhigh": 87}
ON, OFF = "thinking", "no-thinking"


@dataclass(frozen=True)
class Thinking:
    """`effort`: as `ds4.model.chat.render` takes it. `budget`: tokens of reasoning at most; None: no such bound."""

    on: bool
    effort: int | str | None = None
    budget: int | None = None


def thinking_of(fields: Fields) -> Thinking:
    """What a body says of thinking, in whichever of the names above.

    Raises:
        RequestError: names the field.
    """
    kwargs = fields.nested("chat_template_kwargs") or Fields({})
    for name in kwargs.raw:
        if name not in SWITCHES:
            kwargs.refuse(name, [], "is not supported by this server")
    think, think_effort = _think(fields.raw.get("think"))
    switched = [
        _switch(fields.raw.get("thinking")), fields.boolean("enable_thinking"), think, kwargs.boolean("thinking"),
        kwargs.boolean("enable_thinking"),
    ]  # fmt: skip
    efforts = [fields.raw.get("reasoning_effort"), think_effort, kwargs.raw.get("reasoning_effort")]
    on = _one(switched, "thinking", "enable_thinking, think")
    effort = known_effort(_one(efforts, "reasoning_effort", "think"))
    budget = _budget(fields)
    if effort == "none":
        return Thinking(False)
    if on is None and effort is None:
        on, effort = suffix_of(fields.string("model") or "")
    return Thinking((effort is not None) if on is None else bool(on), effort, budget)


def known_effort(effort: Any, field: str = "reasoning_effort") -> Any:
    """An effort of another API's names as a number; anything else as it is, "none" too. `field`: where it stood.

    Raises:
        RequestError: no effort at all.
    """
    if effort is None or effort == "none":
        return effort
    if isinstance(effort, str) and effort in OTHER_NAMES:
        return OTHER_NAMES[effort]
    try:
        resolve_effort(effort)
    except RequestError:
        names = ", ".join(["none", *sorted({**EFFORTS, **OTHER_NAMES}, key=lambda n: {**EFFORTS, **OTHER_NAMES}[n])])
        raise RequestError(f"{field} is {effort!r:.40}; use {names}, or an integer from 1 to 100", field) from None
    return effort


def suffix_of(model: str) -> tuple[bool | None, int | str | None]:
    """`NAME:thinking`, `NAME:no-thinking`, `NAME:EFFORT`; (None, None): the name says nothing."""
    _, colon, suffix = model.rpartition(":")
    if not colon:
        return None, None
    if suffix in (ON, OFF):
        return suffix == ON, None
    if suffix == "none":
        return False, None
    if suffix in EFFORTS or suffix in OTHER_NAMES:
        return True, known_effort(suffix)
    if suffix.isascii() and suffix.isdigit() and len(suffix) <= 3 and 1 <= int(suffix) <= 100:
        return True, int(suffix)
    return None, None


def _switch(thinking: Any) -> bool | None:
    value = TYPES.get(str(thinking.get("type")), thinking) if isinstance(thinking, dict) else thinking
    if value is not None and not isinstance(value, bool):
        raise RequestError(
            'thinking must be true, false, or {"type": "enabled", "adaptive" or "disabled"}', "thinking"
        )
    return value


def _think(think: Any) -> tuple[bool | None, Any]:
    """A boolean, or an effort by its name."""
    if think is None or isinstance(think, bool):
        return think, None
    if isinstance(think, str) and think in ("none", *EFFORTS, *OTHER_NAMES):
        return None, think
    raise RequestError("think must be true, false, or the name of an effort", "think")


def _budget(fields: Fields) -> int | None:
    """`thinking.budget_tokens`, or one of its other names."""
    nested = fields.nested("thinking") if isinstance(fields.raw.get("thinking"), dict) else None
    said = [
        None if nested is None else nested.integer("budget_tokens", 0, 2**31 - 1),
        fields.integer("max_thinking_tokens", 0, 2**31 - 1),
        fields.integer("thinking_budget", 0, 2**31 - 1),
    ]
    budget: int | None = _one(said, "thinking.budget_tokens", "max_thinking_tokens, thinking_budget")
    return budget


def _one(said: Sequence[Any], name: str, others: str) -> Any:
    """What was said in one place or alike in several; None: nowhere."""
    said = [s for s in said if s is not None]
    if any(s != said[0] or isinstance(s, bool) != isinstance(said[0], bool) for s in said):
        raise RequestError(
            f"{name} and its other names ({others}, chat_template_kwargs) say different things; give one of them",
            name,
        )
    return said[0] if said else None
