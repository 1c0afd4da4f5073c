"""The one form that chats of every API are read into: messages of ds4.model.chat, tools, thinking.

Its prompt is rendered here, and what of it is logged has the names of /v1/chat/completions, so that nights and
corrections read requests of all APIs alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ds4.errors import RequestError
from ds4.model.chat import attach_tools, other_turns, prepare, render, resolve_effort
from ds4.model.tokenizer import ASSISTANT, END_THINK, THINK, Segment, Special
from ds4.server.fields import Fields, naming
from ds4.server.request import Limits, ServedModel, Tools
from ds4.server.shape import Shape
from ds4.server.shared_fields import FAR, LATER, Asked, Names, generation_of
from ds4.server.thinking import Thinking
from ds4.server.tool_fields import check_results

_PLACE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True)
class ChatForm:
    """A chat.

    Attributes:
        messages: as `ds4.model.chat.render` takes them.
        tools: that the model is told of.
        names: what its API calls the fields.
        shape: what is asked of the answer.
        places: where each message came from, in its API's words; empty: they came as they are.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Tools | None
    thinking: Thinking
    names: Names
    shape: Shape
    places: Sequence[str] = field(default=())

    def logged(self) -> dict[str, Any]:
        """What its prompt is made of, as a body of /v1/chat/completions would say it."""
        tools = {} if self.tools is None else {"tools": list(self.tools.declared)}
        effort = resolve_effort(self.thinking.effort)
        return {"messages": self.messages, **tools, "thinking": self.thinking.on, "effort": effort}

    def segments(self, engine: ServedModel) -> list[Segment]:
        """The prompt.

        Raises:
            RequestError: names the message, and what is wrong with it.
        """
        with self._placed():
            _, images = prepare(self.messages)
            if images:
                where = self.names.prompt
                raise RequestError(f"{where}: an image {LATER}", where, "unsupported_parameter")
            _check_content(self.messages)
            check_results(self.messages)
            told = attach_tools(self.messages, None if self.tools is None else list(self.tools.declared))
            return render(
                told, thinking=self.thinking.on, effort=self.thinking.effort, tool_text=engine.tokenizer.tool_text
            )

    def prompt(self, engine: ServedModel, most: int | None = None) -> tuple[list[int], bool]:
        """The prompt's ids (of more than `most` the first ones are enough), and whether the model goes on inside a
        reasoning block.

        Raises:
            RequestError: as `segments`.
        """
        segments = self.segments(engine)
        with self._placed():
            return engine.tokenizer.encode_segments(segments, True, most), _ends_in_reasoning(segments)

    def asked(self, fields: Fields, engine: ServedModel, limits: Limits, logprobs: int | None) -> Asked:
        """What a body with this chat asks for.

        Raises:
            RequestError: as `prompt` and `generation_of`.
        """
        ids, in_reasoning = self.prompt(engine, FAR * engine.config.max_position_embeddings)
        generation = generation_of(
            fields, engine, limits, ids, self.names, in_reasoning=in_reasoning, logprobs=logprobs
        )
        chat = replace(generation, ends=other_turns(engine.tokenizer), tools=self.tools)
        return Asked(chat, self.logged(), fields.boolean("return_progress") or False, self.shape)

    def told(self, schema: Mapping[str, Any] | None, field: str) -> ChatForm:
        """This chat, whose model is told of the schema that its answer follows: in the first system message, as the
        chat format has it, or in one of its own in front.

        Raises:
            RequestError: that message has a format of its own.
        """
        if schema is None:
            return self
        messages, places = list(self.messages), list(self.places)
        i = next((i for i, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") == "system"), None)
        if i is None:
            messages.insert(0, {"role": "system", "content": ""})
            places = [field, *(places or [f"messages[{j}]" for j in range(len(messages) - 1)])]
            i = 0
        elif messages[i].get("response_format") is not None:
            raise RequestError(f"messages[{i}] and {field} both say what the answer is; give one of them", field)
        messages[i] = {**messages[i], "response_format": schema}
        return replace(self, messages=messages, places=places)

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Errors about a message tell its place in the body."""
        try:
            with naming(self.names.prompt):
                yield
        except RequestError as e:
            if not self.places:
                raise
            param = self.names.prompt if e.param == "messages" else e.param
            raise RequestError(self._in_words_of_api(str(e)), self._in_words_of_api(param or ""), e.code) from e

    def _in_words_of_api(self, text: str) -> str:
        return _PLACE.sub(lambda m: self.places[int(m[1])] if int(m[1]) < len(self.places) else m[0], text)


def _check_content(messages: Sequence[Mapping[str, Any]]) -> None:
    """Only an assistant's message may have no content; a user's has some text, and the prompt as a whole too.

    `messages` went through `prepare`: their types are right.
    """
    said = False
    for i, message in enumerate(messages):
        name, content, role = f"messages[{i}].content", message.get("content"), message["role"]
        if content is None and role != "assistant":
            raise RequestError(f"{name} is missing or null; only an assistant message may have none", name)
        blank = content is None or (
            not content
            if isinstance(content, str)
            else not any(b.get("type") != "text" or b.get("text") for b in content)
        )
        if blank and role == "user":
            raise RequestError(f"{name} is empty; a user message needs some text", name)
        said |= not blank or bool(message.get("tool_calls"))
    if not said:
        raise RequestError("messages have no text; a prompt needs some", "messages")


def _ends_in_reasoning(segments: Sequence[Segment]) -> bool:
    """Whether the model's turn begins inside a reasoning block."""
    marks = [s.name for s in segments if isinstance(s, Special) and s.name in (THINK, END_THINK, ASSISTANT)]
    return bool(marks) and marks[-1] == THINK
