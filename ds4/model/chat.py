"""Messages to prompt: the released chat format, rendered exactly (encoding.md 3 to 5).

`render` is the only way from messages to a prompt. It returns segments: added tokens that the format itself
writes, and text, which stays text whatever it spells. Preparation, then one rule a role, then the header that
opens the model's turn. Effort names are those of the current revision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds4.errors import RequestError
from ds4.model.tokenizer import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    IMAGE,
    REMINDER,
    SYSTEM,
    TASKS,
    THINK,
    USER,
    Segment,
    Special,
    Tokenizer,
)
from ds4.model.tools import OWN_TOOL_TEXT, ToolText, json_text, render_calls, render_tools

ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"
RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_IMAGE_BLOCKS = ("image_url", "image")


@dataclass
class Block:
    """A piece of a user turn: text, or the result of the tool call `call_id`."""

    segments: list[Segment]
    call_id: str | None = None
    is_result: bool = False


@dataclass
class Turn:
    """A message after preparation; a user turn may hold several messages."""

    role: str
    blocks: list[Block] = field(default_factory=list)
    tools: Sequence[Any] = ()
    response_format: Any = None
    calls: Sequence[Any] = ()
    markup: Sequence[Segment] = ()  # of the calls
    reasoning: str = ""
    task: str | None = None
    wo_eos: bool = False


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    effort: int | str | None = None,
    tool_text: ToolText = OWN_TOOL_TEXT,
    continuing: bool = False,
) -> list[Segment]:
    """The prompt for `messages`, up to the point where the model writes.

    Args:
        messages: objects with `role` and `content`; optional `tools`, `response_format` (system), `tool_calls`,
            `reasoning_content`, `task`, `wo_eos` (assistant), `tool_call_id` (tool).
        thinking: thinking mode, else chat mode.
        effort: 1 to 100 or a name of `EFFORTS`; None is `DEFAULT_EFFORT`. Checked in both modes.
        tool_text: the fixed text around tool schemas; `tools.load_tool_text` reads the released one.
        continuing: the prompt goes on after an earlier one: no begin-of-sentence token.

    Raises:
        RequestError: names the message, its field, what is allowed.
    """
    level = resolve_effort(effort)
    turns, _ = prepare(messages)
    drop = not any(t.tools for t in turns)
    last = max((i for i, t in enumerate(turns) if t.role == "user" or (t.role == "system" and i > 0)), default=-1)

    out: list[Segment] = [] if continuing else [Special(BOS)]
    for i, turn in enumerate(turns):
        if i == 0 and (thinking or turn.role == "system"):
            out.append(Special(SYSTEM))
        if i == 0 and thinking:
            out.append(
                f"Reasoning Effort: {level} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
            )
        if turn.role == "system":
            out += [Special(SYSTEM)] if i > 0 else []
            out += _system(turn, tool_text)
        elif turn.role == "assistant":
            after_task = i > 0 and turns[i - 1].task is not None
            out += _assistant(turn, show_reasoning=thinking and not after_task and (not drop or i > last))
        else:
            out.append(Special(USER if turn.role == "user" else REMINDER))
            out += _joined(turn.blocks)
        if i + 1 == len(turns) or turns[i + 1].role in ("assistant", "latest_reminder"):
            out += _header(turn, i, thinking, reasons=thinking and (not drop or i >= last))
    return [s for s in out if s != ""]


def other_turns(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that begin a turn, or a conversation: as far as this vocabulary has them.

    An assistant's turn cannot hold one. A model that draws one has left its turn without the end of sentence, as a
    small or badly quantized one does; what follows is not part of the answer.
    """
    return frozenset(tokenizer.added[n] for n in (BOS, SYSTEM, USER, ASSISTANT) if n in tokenizer.added)


def _system(turn: Turn, tool_text: ToolText) -> list[Segment]:
    out = _joined(turn.blocks)
    if turn.tools:
        out += ["\n\n", *render_tools(turn.tools, tool_text)]
    if turn.response_format is not None:
        out += ["\n\n", RESPONSE_FORMAT, json_text(turn.response_format)]
    return out


def _assistant(turn: Turn, show_reasoning: bool) -> list[Segment]:
    out: list[Segment] = [turn.reasoning, Special(END_THINK)] if show_reasoning else []
    out += _joined(turn.blocks)
    if turn.calls:
        out += ["\n\n", *turn.markup]
    return out if turn.wo_eos else [*out, Special(EOS)]


def _header(turn: Turn, i: int, thinking: bool, reasons: bool) -> list[Segment]:
    """What opens the model's turn after turn `i`; empty if the turn opens none."""
    if turn.task == "action":
        return [Special(ASSISTANT), Special(THINK if thinking else END_THINK), Special("<｜action｜>")]
    if turn.task is not None:
        return [Special(f"<｜{turn.task}｜>")]
    if turn.role == "user" or (turn.role == "system" and i > 0):
        return [Special(ASSISTANT), Special(THINK if reasons else END_THINK)]
    return []


def _joined(blocks: Sequence[Block]) -> list[Segment]:
    """Blocks with a blank line between them; a tool result in its tags, which are plain text."""
    out: list[Segment] = []
    for k, block in enumerate(blocks):
        out += ["\n\n"] if k else []
        out += ["<tool_result>", *block.segments, "</tool_result>"] if block.is_result else block.segments
    return out


def resolve_effort(effort: int | str | None) -> int:
    """Reasoning effort as a number.

    Raises:
        RequestError: a boolean, a float, an unknown name, or outside 1 to 100.
    """
    if effort is None:
        effort = DEFAULT_EFFORT
    if isinstance(effort, str) and effort in EFFORTS:
        return EFFORTS[effort]
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    names = ", ".join(EFFORTS)
    raise RequestError(
        f"reasoning_effort is {effort!r}; use {names}, or an integer from 1 to 100", "reasoning_effort"
    )


def attach_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[Mapping[str, Any]]:
    """A request's top-level tools go to its first system message; without one, to an empty one in front.

    Raises:
        RequestError: messages that are no list of objects; that system message declares tools of its own.
    """
    if not isinstance(messages, (list, tuple)) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError("messages must be a list of objects", "messages")
    if not tools:
        return list(messages)
    i = next((i for i, m in enumerate(messages) if m.get("role") == "system"), None)
    if i is None:
        return [{"role": "system", "content": "", "tools": tools}, *messages]
    if messages[i].get("tools"):
        raise RequestError(f"messages[{i}] and the request both declare tools", "tools")
    return [*messages[:i], {**messages[i], "tools": tools}, *messages[i + 1 :]]


def prepare(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Turn], list[Mapping[str, Any]]]:
    """Check and normalise messages: tool results into user turns, user turns merged, results in call order.

    Returns:
        The turns, and every image block in the order of its placeholders.

    Raises:
        RequestError: as `render`.
    """
    if not isinstance(messages, (list, tuple)):
        raise RequestError(f"messages must be a list, is {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("messages is empty; a prompt needs at least one", "messages")
    images: list[Mapping[str, Any]] = []
    turns: list[Turn] = []
    order: dict[str, int] = {}
    for i, message in enumerate(messages):
        turn = _read(message, f"messages[{i}]", images)
        before = turns[-1] if turns and turns[-1].role == "user" else None
        if turn.role == "tool":
            turn.role = "user"
            merge = before is not None
        else:
            merge = turn.role == "user" and before is not None and before.task is None
        if merge and before is not None:
            before.blocks += turn.blocks
            before.task = turn.task if turn.task is not None else before.task
            before.wo_eos |= turn.wo_eos
            before.tools = [*before.tools, *turn.tools]
        else:
            turns.append(turn)
    for turn in turns:
        if turn.role == "assistant" and turn.calls:
            ids = [c.get("id") for c in turn.calls if isinstance(c, Mapping)]
            order = {k: n for n, k in enumerate(ids) if isinstance(k, str)}
        elif turn.role == "user":
            _sort_results(turn.blocks, order)
    return turns, images


def _sort_results(blocks: list[Block], order: Mapping[str, int]) -> None:
    """Tool results by the order of their calls, among their own places only; unknown ids count as first."""
    places = [k for k, block in enumerate(blocks) if block.is_result]
    ranked = sorted((blocks[k] for k in places), key=lambda b: order.get(b.call_id or "", 0))
    for k, block in zip(places, ranked):
        blocks[k] = block


def _read(message: Any, where: str, images: list[Mapping[str, Any]]) -> Turn:
    """One message, every field checked."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, is {type(message).__name__}", "messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}: role is {role!r}; known are {', '.join(ROLES)}", "messages")
    turn = Turn(role)
    content = message.get("content")
    if role == "tool":
        call_id = _typed(message, "tool_call_id", str, where)
        inner = _blocks(content, where, images, refuse_image=False)
        turn.blocks = [Block(_joined(inner), call_id=call_id, is_result=True)]
    else:
        turn.blocks = _blocks(content, where, images, refuse_image=role == "user")
    turn.tools = _typed(message, "tools", list, where) or []
    turn.task = _typed(message, "task", str, where)
    if turn.task is not None and turn.task not in TASKS:
        raise RequestError(f"{where}: task is {turn.task!r}; known are {', '.join(TASKS)}", "messages")
    turn.wo_eos = _typed(message, "wo_eos", bool, where) or False
    turn.response_format = message.get("response_format")
    if turn.response_format is not None and role != "system":
        raise RequestError(f"{where}: response_format belongs to a system message", "messages")
    turn.calls = _typed(message, "tool_calls", list, where) or []
    turn.markup = render_calls(turn.calls, f"{where}.tool_calls") if turn.calls else ()
    turn.reasoning = _typed(message, "reasoning_content", str, where) or ""
    if (turn.calls or turn.reasoning) and role != "assistant":
        raise RequestError(f"{where}: tool_calls and reasoning_content belong to an assistant message", "messages")
    _no_image(turn.reasoning, f"{where}.reasoning_content")
    return turn


def _typed(message: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = message.get(key)
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{where}.{key} must be {kind.__name__}, is {type(value).__name__}", "messages")
    return value


def _blocks(content: Any, where: str, images: list[Mapping[str, Any]], refuse_image: bool) -> list[Block]:
    """Content as blocks: a string is one, a list has one an entry, nothing is none."""
    if content is None:
        return []
    if isinstance(content, str):
        if refuse_image:
            _no_image(content, where)
        return [Block([content])]
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where}.content must be a string or a list, is {type(content).__name__}", "messages")
    out: list[Block] = []
    for j, block in enumerate(content):
        place = f"{where}.content[{j}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            raise RequestError(f"{place} must be an object with a type", "messages")
        if kind in _IMAGE_BLOCKS:
            images.append(block)
            out.append(Block([Special(IMAGE)]))
        elif kind == "text":
            text = _typed(block, "text", str, place) or ""
            _no_image(text, place)
            out.append(Block([text]))
        elif kind == "tool_result":
            call_id = _typed(block, "tool_use_id", str, place) or _typed(block, "tool_call_id", str, place)
            inner = _blocks(block.get("content"), place, images, refuse_image=False)
            out.append(Block(_joined(inner), call_id=call_id, is_result=True))
        else:
            out.append(Block([f"[Unsupported {kind}]"]))
    return out


def _no_image(text: str, where: str) -> None:
    if IMAGE in text:
        raise RequestError(f"{where} spells the image placeholder {IMAGE}; send the image as a block", "messages")
