"""Dialogues with tools: what is declared, asked, called, returned and answered.

Names and wordings of tools vary, arguments are strings, numbers, booleans, lists and objects, and some answers
call twice at once. A conversation may end with the call, with the answer to its result, or without a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from train.material import Material

Json = dict[str, Any]
# fmt: off
CITIES = (
    "Rome", "Oslo", "Paris", "Berlin", "Tokyo", "Lima", "Cairo", "Madrid", "Vienna", "Dublin", "Prague", "Boston",
    "Delhi", "Quito", "Seoul", "北京", "上海", "Zürich", "São Paulo", "Helsinki", "Toronto", "Nairobi",
)
SKIES = ("sunny", "cloudy", "light rain", "snow", "clear", "windy", "fog", "thunderstorms")
FILES = (
    "notes.txt",
    "main.py",
    "README.md",
    "data.csv",
    "report.pdf",
    "setup.cfg",
    "index.html",
    "todo.txt",
    "a.log",
)
FOLDERS = ("src", "docs", "/tmp", "/home/ann", "tests", ".", "/var/log", "build", "data/2024")

# fmt: on


@dataclass(frozen=True)
class Scene:
    """A question, the calls that answer it, their results, the answer, and a thought before each."""

    declared: list[Json]
    user: str
    calls: list[tuple[str, Json]]
    results: list[str]
    answer: str
    plan: str
    reading: str


SceneKind = Callable[[Random, Material], Scene]


def declare(name: str, description: str, required: int = 1, /, **parameters: str) -> Json:
    """A tool of the usual schema; the first `required` parameters must be given."""
    properties = {}
    for key, kind in parameters.items():
        properties[key] = {"type": "array", "items": {"type": "string"}} if kind == "array" else {"type": kind}
    schema: Json = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(parameters)[:required]
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def weather(rng: Random, m: Material) -> Scene:
    name = rng.choice(("get_weather", "weather", "current_weather", "forecast"))
    with_days = rng.random() < 0.35
    parameters = {"city": "string", "days": "integer"} if with_days else {"city": "string"}
    tool = declare(
        name, rng.choice(("Weather of a city.", "Get the weather for a city", "Current weather")), **parameters
    )
    cities = rng.sample(CITIES, 2 if rng.random() < 0.3 else 1)
    days = rng.randint(2, 7)
    where = " and in ".join(cities)
    user = rng.choice((f"What is the weather in {where}?", f"How is the weather in {where}?", f"Weather in {where}?"))
    if with_days:
        user = rng.choice(
            (f"What will the weather be in {where} for {days} days?", f"{days}-day forecast for {where}?")
        )
    calls: list[tuple[str, Json]] = [(name, {"city": c, "days": days} if with_days else {"city": c}) for c in cities]
    skies = [(rng.choice(SKIES), rng.randint(-8, 34)) for _ in cities]
    as_json = rng.random() < 0.6
    results = [json.dumps({"sky": s, "celsius": t}) if as_json else f"{s}, {t} C" for s, t in skies]
    said = [f"In {c} it is {t} degree{'' if abs(t) == 1 else 's'}: {s}." for c, (s, t) in zip(cities, skies)]
    span = f" for {days} days" if with_days else ""
    plan = f"The user wants the weather in {where}{span}. I call {name}."
    return Scene([tool], user, calls, results, " ".join(said), plan, "The result has the sky and the temperature.")


def look_up(rng: Random, m: Material) -> Scene:
    name = rng.choice(("lookup", "dictionary", "define_word", "look_up", "get_definition"))
    key = rng.choice(("word", "term", "query"))
    tool = declare(name, rng.choice(("Look a word up in a dictionary.", "Definition of a word")), **{key: "string"})
    words = rng.sample(m.words, 2 if rng.random() < 0.25 else 1)
    asked = " and ".join(f'"{w.word}"' for w in words)
    user = rng.choice(
        (
            f"Look up {asked}.",
            f"Please look up {asked} in the dictionary.",
            f"What does the dictionary say about {asked}?",
        )
    )
    answer = " ".join(f"{w.word[0].upper()}{w.word[1:]}: {w.gloss}." for w in words)
    calls: list[tuple[str, Json]] = [(name, {key: w.word}) for w in words]
    return Scene(
        [tool],
        user,
        calls,
        [w.gloss for w in words],
        answer,
        f"I look up {asked} with {name}.",
        "Here is the definition.",
    )


def search(rng: Random, m: Material) -> Scene:
    name = rng.choice(("search", "web_search", "search_docs", "find"))
    tool = declare(name, rng.choice(("Search documents.", "Search the web")), query="string", limit="integer")
    t = rng.choice(m.terms)
    limit = rng.randint(1, 5)
    user = rng.choice(
        (f"Search for {t.name}.", f'Find something about "{t.name}".', f"Search for {t.name} and tell me what it is.")
    )
    arguments: Json = {"query": t.name}
    if rng.random() < 0.6:
        arguments["limit"] = limit
        user += rng.choice((f" At most {limit} results.", f" Give me {limit} hit{'s' if limit > 1 else ''}."))
    result = (
        json.dumps([{"title": t.name, "text": t.definition}], ensure_ascii=False)
        if rng.random() < 0.5
        else t.definition
    )
    return Scene(
        [tool], user, [(name, arguments)], [result], t.definition, f'I search for "{t.name}".', "One hit answers it."
    )


def calculator(rng: Random, m: Material) -> Scene:
    a, b = rng.randint(2, 999), rng.randint(2, 99)
    sign, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    spoken = {"+": "plus", "-": "minus", "*": "times"}[sign]
    user = rng.choice(
        (f"What is {a} {spoken} {b}?", f"Compute {a} {sign} {b}.", f"Use the calculator: {a} {sign} {b}")
    )
    if rng.random() < 0.5:
        name = rng.choice(("calculator", "calculate", "evaluate"))
        tool = declare(name, rng.choice(("Evaluate an expression.", "A calculator")), expression="string")
        arguments: Json = {"expression": f"{a} {sign} {b}"}
    else:
        name = {"+": "add", "-": "subtract", "*": "multiply"}[sign]
        tool = declare(name, f"{name.capitalize()} two numbers.", 2, a="number", b="number")
        arguments = {"a": a, "b": b}
    answer = rng.choice((f"{a} {sign} {b} = {value}.", f"The result is {value}.", f"{value}."))
    return Scene(
        [tool],
        user,
        [(name, arguments)],
        [str(value)],
        answer,
        f"A calculation: I call {name}.",
        f"The result is {value}.",
    )


def list_files(rng: Random, m: Material) -> Scene:
    name = rng.choice(("list_files", "ls", "list_directory", "dir"))
    tool = declare(
        name, rng.choice(("List the files of a folder.", "List files")), path="string", recursive="boolean"
    )
    folder, found = rng.choice(FOLDERS), rng.sample(FILES, rng.randint(1, 4))
    recursive = rng.random() < 0.4
    user = rng.choice(
        (f"Which files are in {folder}?", f"List the files in {folder}", f"What is in the folder {folder}?")
    )
    user += rng.choice((" Look into subfolders, too.", " Recursively, please.")) if recursive else ""
    arguments: Json = {"path": folder, "recursive": True} if recursive else {"path": folder}
    if not recursive and rng.random() < 0.4:
        arguments["recursive"] = False
    result = json.dumps(found) if rng.random() < 0.5 else "\n".join(found)
    count = f"There {'is 1 file' if len(found) == 1 else f'are {len(found)} files'} in {folder}"
    return Scene(
        [tool],
        user,
        [(name, arguments)],
        [result],
        f"{count}: {', '.join(found)}.",
        f"I list {folder} with {name}.",
        f"{len(found)} found.",
    )


def read_file(rng: Random, m: Material) -> Scene:
    name = rng.choice(("read_file", "cat", "open_file"))
    tool = declare(name, rng.choice(("Read a text file.", "Contents of a file")), path="string")
    path = f"{rng.choice(FOLDERS)}/{rng.choice(FILES)}".removeprefix("./")
    content = rng.choice(m.words).gloss
    user = rng.choice((f"What does {path} say?", f"Read {path}, please.", f"Show me the contents of {path}."))
    return Scene(
        [tool],
        user,
        [(name, {"path": path})],
        [content],
        f"{path} says: {content}",
        f"I read {path}.",
        "The file has one line.",
    )


def send(rng: Random, m: Material) -> Scene:
    name = rng.choice(("send_message", "send_mail", "notify"))
    tool = declare(
        name, rng.choice(("Send a message.", "Send text to people")), 2, to="array", text="string", options="object"
    )
    people = rng.sample(("Ann", "Bo", "Chen", "Dora", "Emil", "Fatima", "李明"), rng.randint(1, 3))
    text = rng.choice(("The meeting is at noon.", "I am late.", "The build is green.", "See you tomorrow!", "Lunch?"))
    arguments: Json = {"to": people, "text": text}
    urgent = rng.random() < 0.3
    if urgent:
        arguments["options"] = {"urgent": True}
    names = " and ".join(people)
    user = f'{rng.choice(("Tell", "Write to"))} {names}: "{text}"{" It is urgent." if urgent else ""}'
    return Scene(
        [tool],
        user,
        [(name, arguments)],
        [rng.choice(("ok", "sent", '{"status": "sent"}'))],
        f"I sent it to {names}.",
        f"A message to {names}: I call {name}.",
        "It was sent.",
    )


def element(rng: Random, m: Material) -> Scene:
    name = rng.choice(("get_element", "element_info", "periodic_table"))
    tool = declare(name, rng.choice(("Data of a chemical element.", "Look up an element")), symbol="string")
    e = rng.choice(m.elements)
    user = rng.choice(
        (f"Which element is {e.symbol}?", f"Look up the element {e.symbol}.", f"What is {e.symbol}? Use the table.")
    )
    result = json.dumps({"name": e.name, "number": e.number})
    answer = f"{e.symbol} is {e.name.lower()}, element number {e.number}."
    return Scene(
        [tool],
        user,
        [(name, {"symbol": e.symbol})],
        [result],
        answer,
        f"I look {e.symbol} up.",
        "The name and the number are there.",
    )


def code_lookup(rng: Random, m: Material) -> Scene:
    name = rng.choice(("icd_lookup", "get_code", "icd10"))
    tool = declare(name, rng.choice(("Heading of an ICD-10-CM code.", "Look up a diagnosis code")), code="string")
    code, heading = rng.choice(m.codes)
    user = rng.choice((f"What is {code}?", f"Look up the code {code}.", f"Which diagnosis is {code}?"))
    return Scene(
        [tool],
        user,
        [(name, {"code": code})],
        [heading],
        f"{code} is {heading}.",
        f"{code} is a code. I call {name}.",
        "The heading is there.",
    )


def clock(rng: Random, m: Material) -> Scene:
    if rng.random() < 0.5:
        name = rng.choice(("get_time", "now", "clock"))
        tool = declare(name, "The current time.", 0)
        time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        user = rng.choice(("What time is it?", "Tell me the time.", "Do you have the time?"))
        return Scene(
            [tool],
            user,
            [(name, {})],
            [time],
            rng.choice((f"It is {time}.", f"{time}.")),
            f"I need the time: {name}.",
            f"It is {time}.",
        )
    name = rng.choice(("set_timer", "start_timer", "remind_me"))
    tool = declare(name, "Start a timer.", minutes="number", label="string")
    minutes = rng.choice((1, 2.5, 5, 10, 12, 15, 30, 45, 90))
    label = rng.choice(("tea", "eggs", "bread", "break", "laundry"))
    user = rng.choice((f"Set a timer for {minutes} minutes for the {label}.", f"{minutes} minutes, {label}, please."))
    return Scene(
        [tool],
        user,
        [(name, {"minutes": minutes, "label": label})],
        ["started"],
        f"The timer for the {label} runs: {minutes} minutes.",
        f"I start a timer with {name}.",
        "It runs.",
    )


SCENES: tuple[SceneKind, ...] = (
    weather,
    weather,
    look_up,
    look_up,
    search,
    calculator,
    calculator,
    list_files,
    read_file,
    send,
    element,
    code_lookup,
    clock,
)


def conversation(
    rng: Random, scene: Scene, others: list[Json], direct: tuple[str, str, str] | None
) -> tuple[list[Json], list[Json]]:
    """Messages and declared tools of one scene.

    Args:
        others: further tools that are declared and not needed.
        direct: a question, its reasoning and its answer for a conversation that needs no tool.
    """
    tools = [*scene.declared, *others]
    rng.shuffle(tools)
    if direct is not None:
        user, reasoning, answer = direct
        return [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer, "reasoning_content": reasoning},
        ], tools
    said = rng.choice(("", "", "", "Let me look.", "One moment.", "I will check."))
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for n, (name, arguments) in enumerate(scene.calls)
    ]
    messages: list[Json] = [
        {"role": "user", "content": scene.user},
        {"role": "assistant", "content": said, "reasoning_content": scene.plan, "tool_calls": calls},
    ]
    if rng.random() < 0.8:
        messages += [{"role": "tool", "tool_call_id": f"call_{n}", "content": r} for n, r in enumerate(scene.results)]
        messages.append({"role": "assistant", "content": scene.answer, "reasoning_content": scene.reading})
    return messages, tools
