"""What the server takes and gives, as an OpenAPI document: /openapi.json.

Written by hand, as the bodies are read by hand: a generator would know neither. Objects may hold more than is said
here; what is not known is ignored.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ds4.engine.sampling import MOST_TOP
from ds4.model.chat import EFFORTS
from ds4.server.request import Limits
from ds4.server.thinking import OTHER_NAMES, TYPES

Schema = dict[str, Any]
JSON = "application/json"
ERRORS = {
    "400": "A field is wrong, which `param` names, or the prompt does not fit the context.",
    "401": "The key is missing or wrong.",
    "404": "There is no such thing here.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "500": "The server's own failure.",
    "503": "Loading, stopping, the queue is full or memory runs out; Retry-After says when to come again.",
}
STRING, BOOLEAN, INTEGER, NUMBER, OBJECT = ({"type": t} for t in ("string", "boolean", "integer", "number", "object"))


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """null means the default."""
    return {"anyOf": [schema, {"type": "null"}]}


def listed(schema: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": schema, **more}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def record(required: Schema, optional: Schema | None = None, **more: Any) -> Schema:
    """An object. Of what is optional, null means the default."""
    properties = required | {k: nullable(v) for k, v in (optional or {}).items()}
    return {"type": "object", "properties": properties, "required": list(required), **more}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def document(limits: Limits, context: int | None = None, *, key: bool = False) -> dict[str, Any]:
    """The document. `context`: of the model that is loaded; `key`: one is asked for."""
    schemas = {**_shared(limits, context), **_openai(context), **_messages(context), **_responses(context), **_text()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ds4-server", "version": _version(),
            "description": "Chat, completions, messages and responses over one model on this machine.",
        },
        "security": [{"bearer": []}, {"x-api-key": []}] if key else [],
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }  # fmt: skip


def _version() -> str:
    try:
        return version("ds4")
    except PackageNotFoundError:  # run from a checkout
        return "0"


# ---- paths ----


def _paths() -> dict[str, Any]:
    name = {"name": "name", "in": "path", "required": True, "schema": STRING}
    response_id = {"name": "response_id", "in": "path", "required": True, "schema": STRING}
    page = [
        {"name": "order", "in": "query", "schema": one_of("asc", "desc")},
        {"name": "limit", "in": "query", "schema": integer(1, 100)},
        {"name": "after", "in": "query", "schema": STRING},
    ]
    health = _get("Whether requests are answered, and how far loading is.", ref("Health"))
    health["responses"]["503"] = _answer("Not yet, or no more.", ref("Health"))
    return {
        "/health": {"get": health | {"security": []}},
        "/metrics": {"get": _get("Counts, times and rates for Prometheus.", STRING, kind="text/plain")},
        "/openapi.json": {"get": _get("This document.", OBJECT)},
        "/v1/models": {"get": _get("The one model.", ref("Models"))},
        "/v1/models/{name}": {"get": _get("The one model.", ref("Model")) | {"parameters": [name]}},
        "/v1/chat/completions": {"post": _post("An answer to a chat.", "ChatRequest", "Chat", streams=True)},
        "/v1/completions": {"post": _post("What follows a text.", "CompletionRequest", "Completion", streams=True)},
        "/v1/messages": {"post": _post("An answer to messages.", "MessagesRequest", "Message", streams=True)},
        "/v1/messages/count_tokens": {"post": _post("Tokens of a prompt.", "CountRequest", "Count")},
        "/v1/responses": {"post": _post("A response, which may be gone on with.", "ResponseRequest", "Response",
                                        streams=True)},
        "/v1/responses/{response_id}": {
            "parameters": [response_id],
            "get": _get("A response that is stored.", ref("Response")),
            "delete": _get("Forget it.", ref("Deleted")),
        },
        "/v1/responses/{response_id}/input_items": {
            "parameters": [response_id, *page],
            "get": _get("What it was asked, and what came before.", ref("Items")),
        },
        "/tokenize": {"post": _post("Text to tokens.", "TokenizeRequest", "Tokens")},
        "/detokenize": {"post": _post("Tokens to text.", "DetokenizeRequest", "Content")},
        "/apply-template": {"post": _post("The prompt of a chat.", "TemplateRequest", "Prompt")},
    }  # fmt: skip


def _answer(description: str, schema: Schema, kind: str = JSON) -> Schema:
    return {"description": description, "content": {kind: {"schema": schema}}}


def _get(summary: str, schema: Schema, kind: str = JSON) -> Schema:
    return {"summary": summary, "responses": {"200": _answer("It.", schema, kind), **_errors("Error")}}


def _post(summary: str, body: str, answer: str, *, streams: bool = False) -> Schema:
    given = _answer("It; with `stream`, server-sent events." if streams else "It.", ref(answer))
    if streams:
        given["content"]["text/event-stream"] = {"schema": ref("Event")}
    error = "MessagesError" if body in ("MessagesRequest", "CountRequest") else "Error"
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {JSON: {"schema": ref(body)}}},
        "responses": {"200": given, **_errors(error)},
    }


def _errors(schema: str) -> Schema:
    return {status: _answer(text, ref(schema)) for status, text in ERRORS.items()}


# ---- schemas ----


def _sampling(limits: Limits) -> Schema:
    return {
        "temperature": {"type": "number", "minimum": 0},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": integer(-1, 2**31 - 1),
        "min_p": number(0, 1),
        "seed": INTEGER,
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": number(0.1, 10),
        "logit_bias": {"type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                       "additionalProperties": number(-100, 100)},
        "stream": BOOLEAN,
        "model": STRING,
        "return_progress": BOOLEAN,
        "grammar": {"type": "string", "minLength": 1},
    }  # fmt: skip


def _thinking() -> Schema:
    names = ["none", *EFFORTS, *OTHER_NAMES]
    budget = integer(0, 2**31 - 1)
    switch = record({"type": one_of(*TYPES)}, {"budget_tokens": budget})
    effort = {"anyOf": [one_of(*names), integer(1, 100)]}
    return {
        "thinking": {"anyOf": [BOOLEAN, switch]}, "enable_thinking": BOOLEAN,
        "think": {"anyOf": [BOOLEAN, one_of(*names)]}, "reasoning_effort": effort, "max_thinking_tokens": budget,
        "thinking_budget": budget,
        "chat_template_kwargs": record({}, {"thinking": BOOLEAN, "enable_thinking": BOOLEAN,
                                            "reasoning_effort": effort}, additionalProperties=False),
    }  # fmt: skip


def _format(*, flat: bool) -> Schema:
    """What an answer has to be. `flat`: the schema stands beside the type."""
    kinds = [record({"type": one_of("text")}), record({"type": one_of("json_object")})]
    schema = record({"schema": OBJECT}, {"name": STRING, "strict": BOOLEAN})
    if flat:
        return {"anyOf": [*kinds, {"allOf": [record({"type": one_of("json_schema")}), schema]}]}
    return {"anyOf": [*kinds, record({"type": one_of("json_schema"), "json_schema": schema})]}


def _stop(limits: Limits) -> Schema:
    text = {"type": "string", "minLength": 1, "maxLength": limits.stop_chars}
    return {"anyOf": [text, listed(text, maxItems=limits.stops)]}


def _tokens(context: int | None) -> Schema:
    return {"type": "integer", "minimum": 1} | ({} if context is None else {"maximum": context})


def _shared(limits: Limits, context: int | None) -> Schema:
    error = record({"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)})
    model = record({"id": STRING}, {"object": STRING, "created": INTEGER, "owned_by": STRING})
    return {
        "Event": record({"data": STRING}, {"event": STRING}),
        "Error": record({"error": error}),
        "MessagesError": record({"type": one_of("error"), "error": record({"type": STRING, "message": STRING})},
                                {"request_id": STRING}),
        "Health": record(
            {"status": STRING},
            {"model": STRING, "sidecars": OBJECT, "queue": OBJECT, "requests": listed(OBJECT), "memory": OBJECT},
        ),
        "Model": model,
        "Models": record({"data": listed(ref("Model"))}),
        "Sampling": record({}, {**_sampling(limits), "stop": _stop(limits)}),
        "MessagesSampling": record({}, {**_sampling(limits), "stop_sequences": _stop(limits)}),
        "Thinking": record({}, _thinking()),
    }  # fmt: skip


def _function(parameters: str) -> Schema:
    return record({"name": {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[A-Za-z0-9_-]+$"}},
                  {"description": STRING, parameters: OBJECT, "strict": BOOLEAN})  # fmt: skip


def _openai(context: int | None) -> Schema:
    text = listed(record({"type": one_of("text"), "text": {"type": "string", "minLength": 1}}), minItems=1)
    content = {"anyOf": [{"type": "string", "minLength": 1}, text]}
    call = record(
        {"id": STRING, "type": one_of("function"), "function": record({"name": STRING, "arguments": STRING})}
    )
    roles = [
        record({"role": one_of("system", "developer", "user"), "content": content}),
        record({"role": one_of("assistant"), "content": content}, {"reasoning_content": STRING,
                                                                   "tool_calls": listed(ref("Call"))}),
        record({"role": one_of("tool"), "content": content, "tool_call_id": {"type": "string", "minLength": 1}}),
    ]  # fmt: skip
    most = {"max_tokens": _tokens(context), "max_completion_tokens": _tokens(context)}
    common = {**most, "n": one_of(1), "response_format": _format(flat=False)}
    common |= {"stream_options": record({}, {"include_usage": BOOLEAN})}
    tool = record({"type": one_of("function"), "function": ref("Function")})
    named = record({"type": one_of("function"), "function": record({"name": STRING})})
    choice = {"anyOf": [one_of("auto", "none", "required"), named]}
    chat = {"tools": listed(tool), "tool_choice": choice, "parallel_tool_calls": BOOLEAN}
    usage = record({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER})
    reasons = one_of("stop", "length", "tool_calls")

    def answer(kind: str, choice: Schema) -> Schema:
        choices = listed(record({"index": INTEGER, **choice, "finish_reason": reasons}), minItems=1, maxItems=1)
        return record({"id": STRING, "object": one_of(kind), "created": INTEGER, "model": STRING, "choices": choices,
                       "usage": ref("Usage")})  # fmt: skip

    message = record({"role": one_of("assistant"), "content": nullable(STRING)},
                     {"reasoning_content": STRING, "tool_calls": listed(ref("Call"))})  # fmt: skip
    ids = listed({"type": "integer", "minimum": 0}, minItems=1)
    return {
        "Call": call, "Function": _function("parameters"), "Usage": usage,
        "ChatMessage": {"anyOf": roles},
        "ChatMessages": listed(ref("ChatMessage"), minItems=1),
        "ChatRequest": {"allOf": [ref("Sampling"), ref("Thinking"), record(
            {"messages": ref("ChatMessages")},
            {**common, **chat, "logprobs": BOOLEAN, "top_logprobs": integer(0, MOST_TOP)},
        )]},
        "Chat": answer("chat.completion", {"message": message}),
        "CompletionRequest": {"allOf": [ref("Sampling"), record(
            {"prompt": {"anyOf": [{"type": "string", "minLength": 1}, ids]}},
            {**common, "logprobs": integer(0, MOST_TOP)},
        )]},
        "Completion": answer("text_completion", {"text": STRING}),
    }  # fmt: skip


def _messages(context: int | None) -> Schema:
    text = record({"type": one_of("text"), "text": {"type": "string", "minLength": 1}})
    result = record(
        {"type": one_of("tool_result"), "tool_use_id": {"type": "string", "minLength": 1}},
        {"content": {"anyOf": [STRING, listed(text)]}, "is_error": BOOLEAN},
    )
    name = {"type": "string", "minLength": 1}
    said = [
        text,
        record({"type": one_of("thinking"), "thinking": STRING}),
        record({"type": one_of("tool_use"), "id": name, "name": name, "input": OBJECT}),
    ]
    plain = {"type": "string", "minLength": 1}
    blocks = {"user": [text, result], "assistant": said}
    content = {r: {"anyOf": [plain, listed({"anyOf": kinds}, minItems=1)]} for r, kinds in blocks.items()}
    message = {"anyOf": [record({"role": one_of(r), "content": content[r]}) for r in blocks]}
    alone = {"disable_parallel_tool_use": BOOLEAN}
    kinds = [record({"type": one_of("auto", "any", "none")}, alone)]
    choice = {"anyOf": [*kinds, record({"type": one_of("tool"), "name": name}, alone)]}
    prompt = record(
        {"messages": listed(ref("MessagesMessage"), minItems=1)},
        {
            "system": {"anyOf": [STRING, listed(text)]},
            "tools": listed(_function("input_schema")),
            "tool_choice": choice,
            "metadata": OBJECT,
            "output_config": record({}, {"effort": one_of(*EFFORTS, *OTHER_NAMES), "format": _format(flat=True)}),
        },
    )
    thinking = record({}, {"thinking": _thinking()["thinking"]})
    usage = record({"input_tokens": INTEGER, "output_tokens": INTEGER, "cache_read_input_tokens": INTEGER})
    return {
        "MessagesMessage": message, "MessagesPrompt": prompt,
        "CountRequest": {"allOf": [ref("MessagesPrompt"), thinking]},
        "Count": record({"input_tokens": INTEGER}),
        "MessagesRequest": {"allOf": [ref("MessagesSampling"), thinking, ref("MessagesPrompt"),
                                      record({}, {"max_tokens": _tokens(context)})]},
        "Message": record({
            "id": STRING, "type": one_of("message"), "role": one_of("assistant"), "model": STRING,
            "content": listed(record({"type": one_of("text", "thinking", "tool_use")})),
            "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": nullable(STRING), "usage": usage,
        }),
    }  # fmt: skip


def _responses(context: int | None) -> Schema:
    text = {"type": "string", "minLength": 1}
    part = record({"type": one_of("input_text", "output_text"), "text": text})
    items = [
        record(
            {
                "role": one_of("user", "system", "developer", "assistant"),
                "content": {"anyOf": [text, listed(part, minItems=1)]},
            },
            {"type": one_of("message")},
        ),
        record({"type": one_of("function_call"), "call_id": text, "name": text, "arguments": STRING}),
        record({"type": one_of("function_call_output"), "call_id": text, "output": STRING}),
    ]
    tool = {"allOf": [record({"type": one_of("function")}), _function("parameters")]}
    named = record({"type": one_of("function"), "name": text})
    request = record(
        {"input": {"anyOf": [text, listed(ref("InputItem"), minItems=1)]}},
        {
            "instructions": STRING,
            "max_output_tokens": _tokens(context),
            "store": BOOLEAN,
            "tools": listed(tool),
            "tool_choice": {"anyOf": [one_of("auto", "none", "required"), named]},
            "text": record({}, {"format": _format(flat=True)}),
            "parallel_tool_calls": BOOLEAN,
            "previous_response_id": STRING,
            "reasoning": record({}, {"effort": one_of("none", *EFFORTS, *OTHER_NAMES)}),
            "user": STRING,
            "metadata": {"type": "object", "additionalProperties": STRING},
            "include": listed(STRING),
            "top_logprobs": integer(0, MOST_TOP),
        },
    )
    usage = record({"input_tokens": INTEGER, "output_tokens": INTEGER, "total_tokens": INTEGER})
    item = record({"type": one_of("message", "reasoning", "function_call"), "id": STRING, "status": STRING})
    return {
        "InputItem": {"anyOf": items},
        "ResponseRequest": {"allOf": [ref("Sampling"), request]},
        "Response": record({
            "id": STRING, "object": one_of("response"), "created_at": INTEGER, "model": STRING,
            "status": one_of("completed", "incomplete"), "output": listed(item), "usage": usage,
            "previous_response_id": nullable(STRING),
        }),
        "Deleted": record({"id": STRING, "deleted": one_of(True)}),
        "Items": record({"object": one_of("list"), "data": listed(OBJECT), "has_more": BOOLEAN}),
    }  # fmt: skip


def _text() -> Schema:
    ids = listed({"type": "integer", "minimum": 0})
    piece = record({"id": INTEGER, "piece": {"anyOf": [STRING, listed(integer(0, 255))]}})
    return {
        "TokenizeRequest": record({"content": STRING}, {"add_special": BOOLEAN, "parse_special": BOOLEAN,
                                                        "with_pieces": BOOLEAN}),
        "Tokens": record({"tokens": {"anyOf": [ids, listed(piece)]}}),
        "DetokenizeRequest": record({"tokens": ids}),
        "Content": record({"content": STRING}),
        "TemplateRequest": {"allOf": [ref("Thinking"), record({"messages": ref("ChatMessages")},
                                                              {"tokens": BOOLEAN})]},
        "Prompt": record({"prompt": STRING}, {"tokens": ids}),
    }  # fmt: skip
