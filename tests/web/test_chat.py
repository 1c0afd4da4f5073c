"""The page at `/` in a real browser: what people do with it, over the real server and a model of forced outputs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ds4.errors import Ds4Error
from ds4.model.tokenizer import ASSISTANT, END_THINK, EOS, THINK
from ds4.server.request import Limits, Progress, ServedEngine
from tests.server.standin import TOKENIZER, StandIn, StandInConfig, StandInSession, ids_of, serve, until
from tests.web.conftest import Tab

PHONE = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
WIDE = (
    "# "
    + "Donaudampfschifffahrtsgesellschaft" * 3
    + """

https://example.org/a/very/long/address/without/any/place/to/break/it/at/all/because/nobody/thought/of/phones

```python
x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]
```

| one | two | three | four | five | six | seven | eight | nine | ten |
|---|---|---|---|---|---|---|---|---|---|
| aaaaaaaa | bbbbbbbb | cccccccc | dddddddd | eeeeeeee | ffffffff | gggggggg | hhhhhhhh | iiiiiiii | jjjjjjjj |
"""
)


class Gate:
    """Holds the device's thread before call number `at` until it is opened."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.open = threading.Event()

    def __call__(self, i: int) -> None:
        if i == self.at:
            assert self.open.wait(30)


def said(engine: StandIn) -> str:
    """The last prompt as text, control tokens spelled."""
    return TOKENIZER.decode(engine.prompts[-1])


def test_an_answer_comes_as_it_is_written(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = {"rounds": 10, "tokens_per_round": 2.4, "acceptance_by_position": [0.81, 0.5]}
    monkeypatch.setattr(StandInSession, "report", lambda self: decode)
    gate = Gate(8)
    with serve(StandIn(ids_of("It is **so**.\n\nReally."), before_token=gate)) as server:
        page = tab.open(server.url)
        page.get_by_text("4,096 tokens").wait_for()
        mounted = " ".join(page.locator("#mounted").inner_text().split())
        assert mounted == "Base stand-in Domain none Post-training none Context 4,096 tokens"
        tab.ask("Is it?")
        tab.answer.get_by_text("It is").wait_for()
        assert tab.answer.get_attribute("aria-busy") == "true" and page.locator("#stop").is_visible()
        gate.open.set()
        tab.done()
        assert tab.answer.locator("strong").inner_text() == "so"
        assert tab.answer.locator(".text p").all_inner_texts() == ["It is so.", "Really."]
        stats = tab.answer.locator(".stats").inner_text()
        assert "22 tokens" in stats and "tokens/s" in stats and "2.40 tokens a pass" in stats
        assert "drafts accepted 81, 50 %" in stats and f"prompt {len(server.engine.prompts[0])} tokens" in stats
        assert page.locator("#said").inner_text() == "The answer is complete"
        assert page.locator("#ask").evaluate("e => e === document.activeElement")
        assert {url.split("/")[2] for url in tab.requests} == {server.url.split("/")[2]}


def test_how_far_the_prompt_is_read(tab: Tab) -> None:
    gate = Gate(2)
    with serve(StandIn(ids_of("ok"), before_chunk=gate)) as server:
        page = tab.open(server.url)
        tab.ask("x" * 300)
        page.get_by_text("Reading the prompt: 128 of").wait_for()
        bar = page.get_by_role("progressbar")
        assert bar.evaluate("b => [b.value, b.max]") == [128, int(said_of(page))]
        gate.open.set()
        tab.done()
        assert not bar.is_visible() and tab.answer.locator(".text").inner_text() == "ok"
        assert f"prompt {len(server.engine.prompts[0])} tokens" in tab.answer.locator(".stats").inner_text()


def said_of(page: Any) -> str:
    """The prompt's length, as the line beside the bar has it."""
    return str(page.locator("#reading-text").inner_text().split(" of ")[1].split()[0])


def test_reasoning_is_folded_and_opens(tab: Tab) -> None:
    with serve(StandIn(ids_of("Six times\nseven.</think>It is 42."))) as server:
        page = tab.open(server.url)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Thinking").select_option("1 to 100")
        page.get_by_label("Effort").fill("7")
        page.get_by_role("button", name="Done").click()
        tab.ask("What is it?")
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "It is 42."
        thought = tab.answer.get_by_text("Six times")
        assert not thought.is_visible() and said(server.engine).endswith(ASSISTANT + THINK)
        assert "Reasoning Effort: 7 " in said(server.engine)
        page.get_by_text("Thought for").click()
        assert thought.is_visible() and thought.inner_text() == "Six times\nseven."
        assert "of reasoning" in tab.answer.locator(".stats").inner_text()
        # an answer that its limit cut goes on behind what was thought
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Most tokens of an answer").fill("19")
        page.get_by_role("button", name="Done").click()
        page.get_by_role("button", name="Write this answer again").click()
        page.get_by_text("token limit").wait_for()
        assert tab.answer.locator(".text").inner_text() == "It"
        server.engine.script = ids_of(" was 42.")
        page.get_by_role("button", name="Continue this answer").click()
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "It was 42."
        assert said(server.engine).endswith(f"{ASSISTANT}{THINK}Six times\nseven.{END_THINK}It")


@pytest.mark.parametrize("how", ["Escape", pytest.param("button", marks=pytest.mark.long)])
def test_an_answer_is_stopped(tab: Tab, how: str) -> None:
    engine = StandIn(ids_of("again "), endless=True, config=StandInConfig(10**6))
    with serve(engine) as server:
        page = tab.open(server.url)
        tab.ask("Say it")
        tab.answer.get_by_text("again again").wait_for()
        if how == "Escape":
            page.keyboard.press("Escape")
        else:
            page.get_by_role("button", name="Stop").click()
        tab.done()
        assert tab.answer.locator(".notice").inner_text() == "You stopped this answer."
        until(lambda: server.worker.running == 0)  # the server heard of it
        assert page.locator("#ask").evaluate("e => e === document.activeElement")
        engine.script, engine.endless = ids_of("fresh"), False
        page.get_by_role("button", name="Write this answer again").click()
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "fresh"
        assert page.locator(".turn.assistant").count() == 1


def test_a_reload_in_the_middle_of_an_answer(tab: Tab) -> None:
    gate = Gate(11)
    engine = StandIn(ids_of("Once upon a time."), before_token=gate)
    with serve(engine) as server:
        page = tab.open(server.url)
        tab.ask("Tell me a story")
        tab.answer.get_by_text("Once upon a").wait_for()
        page.reload()
        assert tab.answer.locator(".text").inner_text() == "Once upon a"
        assert "cut off" in tab.answer.locator(".notice").inner_text()
        assert page.locator(".turn.user .text").inner_text() == "Tell me a story"
        gate.open.set()
        until(lambda: server.worker.running == 0)
        engine.script = ids_of(" day.")
        page.get_by_role("button", name="Continue this answer").click()
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "Once upon a day."
        assert said(engine).endswith(ASSISTANT + END_THINK + "Once upon a")  # the model goes on in its own turn
        assert not tab.answer.locator(".notice").is_visible()
        tab.ask("And then?")  # what was cut and continued is one turn of the next prompt
        tab.done()
        assert f"{END_THINK}Once upon a day.{EOS}" in said(engine)
        page.reload()
        assert page.locator(".turn").count() == 4


@pytest.mark.parametrize("tab", [PHONE], indirect=True)
def test_a_phones_width(tab: Tab) -> None:
    def fits() -> bool:
        return bool(page.evaluate("document.documentElement.scrollWidth <= 360 && document.body.scrollWidth <= 360"))

    sidecars: dict[str, dict[str, str] | None] = {
        "zchain": {"name": "a-domain-of-a-long-name" * 2},
        "posttrain": None,
    }
    with serve(StandIn(ids_of(WIDE), name="ds4-embedded-base-with-a-name" * 2, sidecars=sidecars)) as server:
        page = tab.open(server.url)
        tab.ask("W" * 80)
        tab.done()
        assert fits() and page.locator("table").is_visible()
        log = page.locator("#log")
        assert log.evaluate("e => e.scrollWidth <= e.clientWidth")  # what is wide scrolls in itself
        assert page.locator("pre").evaluate("e => e.scrollWidth > e.clientWidth")
        for button in ("Settings", "Chats"):
            page.get_by_role("button", name=button).tap()
            dialog = page.locator("dialog[open]")
            assert fits() and dialog.evaluate("e => e.scrollWidth <= e.clientWidth")
            page.keyboard.press("Escape")
        for button in page.locator("button:visible").all():
            box = button.bounding_box()
            assert box and box["x"] >= 0 and box["x"] + box["width"] <= 360


def test_by_keyboard_alone(tab: Tab) -> None:
    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))

    with serve(StandIn(ids_of("ok"))) as server:
        page = tab.open(server.url)
        keys = page.keyboard
        assert focused() == "ask"
        keys.type("one")
        keys.press("Shift+Enter")
        keys.type("two")
        keys.press("Enter")
        tab.done()
        assert page.locator(".turn.user .text").inner_text() == "one\ntwo" and focused() == "ask"
        seen = []
        while focused() != "To the message box":  # backwards through all of it, each with its focus to be seen
            keys.press("Shift+Tab")
            seen.append(focused())
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", seen
            assert len(seen) < 20
        assert {"Again", "Edit", "Copy", "log", "settings", "theme"} <= set(seen)
        keys.press("Enter")  # the first stop leads past everything
        assert focused() == "ask"
        while focused() != "settings":
            keys.press("Shift+Tab")
        keys.press("Enter")
        page.get_by_label("System prompt").wait_for()
        keys.type("Be brief.")
        keys.press("Escape")
        assert page.locator("dialog[open]").count() == 0 and focused() == "settings"
        while focused() != "ask":
            keys.press("Tab")
        keys.type("again")
        keys.press("Enter")
        until(lambda: len(server.engine.prompts) == 2)
        tab.done()
        assert "Be brief." in said(server.engine)


def test_the_key_is_asked_for_and_kept_for_the_tab(tab: Tab) -> None:
    with serve(StandIn(ids_of("in")), api_key="secret-of-the-server") as server:
        page = tab.open(server.url)
        key = page.get_by_label("API key")
        key.fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("did not take this key").wait_for()
        key.fill("secret-of-the-server")
        page.keyboard.press("Enter")
        page.get_by_text("4,096 tokens").wait_for()
        tab.ask("hi")
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "in"
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        tab.refused(401)
        page.reload()
        page.get_by_text("4,096 tokens").wait_for()
        assert page.locator("dialog[open]").count() == 0 and tab.complaints == []


@pytest.mark.long
def test_no_key_given(tab: Tab) -> None:
    with serve(StandIn(ids_of("in")), api_key="secret-of-the-server") as server:
        page = tab.open(server.url)
        page.get_by_label("API key").wait_for()
        page.keyboard.press("Escape")
        tab.ask("hi")
        page.get_by_label("API key").wait_for()  # a message asks again
        page.get_by_role("button", name="Cancel").click()
        tab.done()
        assert "asks for a key" in tab.answer.locator(".notice").inner_text()
        assert server.engine.prompts == []
        tab.refused(401)


@pytest.mark.long
def test_a_full_server_is_asked_again(tab: Tab) -> None:
    gate = Gate(1)
    with serve(StandIn(ids_of("free"), before_token=gate), limits=Limits(queue=0)) as server:
        page = tab.open(server.url)
        sock = server.raw("/v1/chat/completions", {"messages": [{"role": "user", "content": "long"}]})
        until(lambda: server.worker.running == 1)
        tab.ask("hi")
        page.get_by_text("Trying again in").wait_for()
        gate.open.set()
        tab.done()
        sock.close()
        assert tab.answer.locator(".text").inner_text() == "free"
        tab.refused(503)


def test_a_chat_that_is_too_long(tab: Tab) -> None:
    with serve(StandIn(ids_of("ok"))) as server:
        tab.open(server.url)
        tab.ask("long " * 1000)
        tab.done()
        notice = tab.answer.locator(".notice").inner_text()
        assert "too long" in notice and "4096 tokens" in notice and "Begin a new chat" in notice
        assert tab.answer.get_by_role("button", name="again").is_visible()
        tab.refused(400)


def test_failures_in_the_middle_keep_what_came(tab: Tab) -> None:
    def fail(i: int) -> None:
        if i == 4:
            raise Ds4Error("the device fell over")

    engine = StandIn(ids_of("half of it"), before_token=fail)
    with serve(engine) as server:
        page = tab.open(server.url)
        tab.ask("hi")
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "half"
        assert "the device fell over" in tab.answer.locator(".notice").inner_text()
        engine.before_token = lambda i: None
        page.get_by_role("button", name="Write this answer again").click()
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "half of it"
        engine.script = []
        page.get_by_role("button", name="Write this answer again").click()
        page.get_by_text("without a word").wait_for()


def test_a_server_that_goes_away(tab: Tab) -> None:
    with serve(StandIn(ids_of("ok"))) as server:
        tab.open(server.url)
    tab.ask("hi")
    tab.done()
    assert "does not answer" in tab.answer.locator(".notice").inner_text()
    assert all("ERR_CONNECTION_REFUSED" in c for c in tab.complaints)
    tab.complaints.clear()


@pytest.mark.long
def test_a_server_that_is_not_ready(tab: Tab) -> None:
    """The head says how far it is, and later who has the device; a message waits for the one and the other."""
    loaded = threading.Event()

    def load(progress: Progress) -> ServedEngine:
        progress(43, 100)
        assert loaded.wait(30)
        return engine

    engine = StandIn(ids_of("ready"))
    with serve(engine, open_engine=load, wait=False) as server:
        page = tab.page
        page.goto(server.url)
        page.get_by_text("loading 43 %").wait_for()
        tab.ask("hi")
        page.get_by_text("Trying again in").wait_for()
        loaded.set()
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "ready"
        page.locator("#state.good").wait_for()
        tab.refused(503)
        loaded.clear()
        lease = server.admin("lend", {"for": "the night"}).json()["lease"]
        page.reload()
        page.get_by_text("lent to the night").wait_for()
        tab.ask("and now?")
        page.get_by_text("Waiting for the server").wait_for()
        loaded.set()
        assert server.admin(f"lend/{lease}/return").status_code == 202
        tab.done()
        assert tab.answer.locator(".text").inner_text() == "ready"


@pytest.mark.long
def test_settings_are_sent_and_kept(tab: Tab) -> None:
    with serve(StandIn(ids_of("ok" * 50))) as server:
        page = tab.open(server.url)
        tab.ask("hi")
        tab.done()
        before = server.engine.samplings[-1]
        assert (before.temperature, before.top_p, before.seeded) == (1.0, 1.0, False)
        page.get_by_role("button", name="Settings").click()
        for label, value in {
            "Temperature": "0.5",
            "Top-p": "0.9",
            "Seed": "12",
            "Most tokens of an answer": "7",
        }.items():
            page.get_by_label(label).fill(value)
        page.get_by_role("button", name="Done").click()
        page.reload()
        tab.ask("hi again")
        tab.done()
        after = server.engine.samplings[-1]
        assert (after.temperature, after.top_p, after.seed, after.seeded) == (0.5, 0.9, 12, True)
        assert "7 tokens" in tab.answer.locator(".stats").inner_text()
        assert "token limit" in tab.answer.locator(".notice").inner_text()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("9")
        page.keyboard.press("Enter")
        assert page.locator("dialog[open]").count() == 1  # a value that the server would refuse does not leave
        page.get_by_role("button", name="As at first").click()
        page.get_by_role("button", name="Done").click()
        tab.ask("and now")
        tab.done()
        assert server.engine.samplings[-1].temperature == 1.0


@pytest.mark.long
def test_chats_are_kept_shown_changed_and_deleted(tab: Tab) -> None:
    with serve(StandIn(ids_of("ok"))) as server:
        page = tab.open(server.url)
        for text in ("First <b>chat</b>", "Second chat"):
            page.get_by_role("button", name="New chat").click()
            tab.ask(text)
            tab.done()
        page.get_by_role("button", name="Chats").click()
        page.get_by_role("button", name="First <b>chat</b>").first.click()
        assert page.locator(".turn.user .text").inner_text() == "First <b>chat</b>"
        tab.ask("More")
        tab.done()
        page.get_by_role("button", name="Edit this message").first.click()
        assert page.locator("#ask").input_value() == "First <b>chat</b>"
        tab.ask("Changed")
        until(lambda: "Changed" in said(server.engine))
        tab.done()
        assert page.locator(".turn .text").all_inner_texts() == ["Changed", "ok"] and "More" not in said(
            server.engine
        )
        page.get_by_role("button", name="Chats").click()
        page.get_by_role("button", name="Delete: Changed").click()
        page.get_by_role("button", name="Close").click()
        page.get_by_text("Ask something.").wait_for()
        page.get_by_role("button", name="Chats").click()
        assert page.locator("#chats-list .title").count() == 1
        page.get_by_role("button", name="Delete all").click()
        assert page.evaluate("Object.keys(localStorage).filter(k => k.startsWith('ds4.chat.')).length") == 0


@pytest.mark.long
@pytest.mark.parametrize("tab", [{"color_scheme": "dark"}], indirect=True)
def test_dark_and_light(tab: Tab) -> None:
    def back() -> int:
        return int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))

    with serve(StandIn(ids_of("ok"))) as server:
        page: Any = tab.open(server.url)
        assert back() < 60
        page.get_by_role("button", name="Colours: as the system").click()
        assert back() > 200
        page.reload()  # it is kept, and drawn in it from the first
        assert back() > 200
        page.get_by_role("button", name="Colours: light").click()
        page.emulate_media(color_scheme="light")
        assert back() < 60
        page.get_by_role("button", name="Colours: dark").click()
        assert back() > 200
