"""Golden prompts of the chat format: inputs, and the prompt written out (encoding.md 7). `{TOOLS}` is the block."""

from typing import Any

B, E, S, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
D = "｜DSML｜"


def effort(n: int) -> str:
    return f"{B}{S}Reasoning Effort: {n} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": text, **more}


def answer(text: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "wx", "description": "Wetter für eine Stadt", "parameters": {"type": "object"}},
    }
]
TWO_TURNS = [user("A?"), answer("A!", reasoning_content="some"), user("B?")]
THINK, CHAT = {"thinking": True}, {"thinking": False}


def parameter(key: str, is_text: bool, value: str) -> str:
    return f'<{D} parameter name="{key}" string="{str(is_text).lower()}">{value}</{D} parameter>\n'


def invoke(name: str, body: str) -> str:
    return f'<{D} invoke name="{name}">\n{body}</{D} invoke>\n'


def calls(*invokes: str) -> str:
    return f"\n\n<{D} calls>\n{''.join(invokes)}</{D} calls>"


WX = invoke(
    "wx", parameter("city", True, "Rome") + parameter("days", False, "3") + parameter("opts", False, '{"c": true}')
)

# name: messages, arguments of render, prompt
GOLDEN: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "G1": ([user("Ping?")], CHAT, f"{B}{U}Ping?{A}</think>"),
    "G2": ([user("Ping?")], THINK, f"{effort(75)}{U}Ping?{A}<think>"),
    "G3": (
        [system("Answer in French."), user("Ping?")],
        {"thinking": True, "effort": 37},
        f"{effort(37)}Answer in French.{U}Ping?{A}<think>",
    ),
    "G4": ([system("Answer in French."), user("Ping?")], CHAT, f"{B}{S}Answer in French.{U}Ping?{A}</think>"),
    "G5": (TWO_TURNS, THINK, f"{effort(75)}{U}A?{A}</think>A!{E}{U}B?{A}<think>"),
    "G6": (TWO_TURNS, CHAT, f"{B}{U}A?{A}</think>A!{E}{U}B?{A}</think>"),
    "G7": ([user("one"), user("two")], CHAT, f"{B}{U}one\n\ntwo{A}</think>"),
    "G8": (
        [user("A?"), answer("A!", reasoning_content="some"), system("Be brief.")],
        THINK,
        f"{effort(75)}{U}A?{A}</think>A!{E}{S}Be brief.{A}<think>",
    ),
    "G9": (
        [
            system("S", tools=TOOLS),
            user("Weather?"),
            answer(
                reasoning_content="plan",
                tool_calls=[call("1", "wx", '{"city":"Rome","days":3,"opts":{"c":true}}')],
            ),
            result("1", "sunny"),
        ],
        THINK,
        f"{effort(75)}S\n\n{{TOOLS}}{U}Weather?{A}<think>plan</think>{calls(WX)}{E}"
        f"{U}<tool_result>sunny</tool_result>{A}<think>",
    ),
    "G10": (
        [
            system("", tools=TOOLS),
            user("Both"),
            answer("ok", tool_calls=[call("a", "w", {"c": "P"}), call("b", "w", {"c": "R"})]),
            result("b", "r2"),
            result("a", "r1"),
            user("go on"),
        ],
        CHAT,
        f"{B}{S}\n\n{{TOOLS}}{U}Both{A}</think>ok"
        + calls(invoke("w", parameter("c", True, "P")), invoke("w", parameter("c", True, "R")))
        + f"{E}{U}<tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result>\n\ngo on{A}</think>",
    ),
    "G11": (
        [
            user(
                [
                    {"type": "text", "text": "Look:"},
                    {"type": "image_url", "image_url": {"url": "data:,"}},
                    {"type": "text", "text": "What is it?"},
                ]
            )
        ],
        CHAT,
        f"{B}{U}Look:\n\n<｜deepseek_image｜>\n\nWhat is it?{A}</think>",
    ),
    "G12": (
        [
            user("x"),
            answer("", tool_calls=[call("a", "f", "not json"), call("b", "g", "{}")]),
            result("a", "k"),
        ],
        CHAT,
        f"{B}{U}x{A}</think>"
        + calls(invoke("f", parameter("arguments", True, "not json")), invoke("g", "\n"))
        + f"{E}{U}<tool_result>k</tool_result>{A}</think>",
    ),
    "G13 action": ([{**user("q"), "task": "action"}], THINK, f"{effort(75)}{U}q{A}<think><｜action｜>"),
    "G13 query": ([{**user("q"), "task": "query"}], CHAT, f"{B}{U}q<｜query｜>"),
    "G14 before": (
        [{"role": "latest_reminder", "content": "R"}, user("q")],
        CHAT,
        f"{B}<｜latest_reminder｜>R{U}q{A}</think>",
    ),
    "G14 after": (
        [user("q"), {"role": "latest_reminder", "content": "R"}],
        CHAT,
        f"{B}{U}q{A}</think><｜latest_reminder｜>R",
    ),
}

G2_IDS = [
    0, 128799, 77666, 288, 9504, 482, 28, 223, 2402, 343, 16801, 223, 19, 15, 1457, 14, 270, 4077, 270, 1990, 14, 270,
    850, 15146, 270, 22805, 868, 128803, 50, 288, 33, 128804, 128821,
]  # fmt: skip
