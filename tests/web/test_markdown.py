"""What answers say, drawn: as it was meant, never as HTML, in time that is linear, and the same however it came."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.standin import StandIn, StandInConfig, ids_of, serve
from tests.web.conftest import Tab

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="hacked = 2"><iframe src="javascript:hacked=3">

[a](javascript:window.hacked=4) [b](JAVASCRIPT:alert(1)) [c](data:text/html,<script>window.hacked=5</script>)
[d](java\tscript:window.hacked=6) [e]( javascript:window.hacked=7) <javascript:window.hacked=8> [f](//evil.example/x)
![g](https://evil.example/tracker.png) ![h](x" onerror="window.hacked=9) [i](https://ok.example/" onclick="hacked=10)
`<img src=x onerror=window.hacked=11>` **<svg onload=window.hacked=12>** </div></article><h1>out</h1>

```html"><script>window.hacked=13</script>
</code></pre><script>window.hacked = 14</script>
```

| <img src=x onerror=window.hacked=15> | b |
|---|---|
| </td></table><script>window.hacked=16</script> | &lt;script&gt;window.hacked=17&lt;/script&gt; |

<style>body { display: none }</style><link rel=stylesheet href=https://evil.example/x.css><base href=https://evil.example>
<form action=https://evil.example><input autofocus onfocus=window.hacked=18></form><details open ontoggle=hacked=19>
"""
SHOWN = (
    "img, script, iframe, style, link, base, form, svg, object, embed, video, [onerror], [onclick], [onload], [style]"
)
PIECES = [
    "# ", "## head\n", "text ", "**", "*", "_", "`", "```\n", "~~~", "- ", "1. ", "> ", "\n", "\n\n", "| a | b |\n",
    "|---|---|\n", "| 1 | 2 |\n", "[x](https://e.org)", "https://e.org/y ", "   ", "---\n", "\\", "<b>", "é", "漢",
    "&lt;", "- [x] done\n", "  - in\n", "    deep\n", "![i](https://e.org/i.png)", "~~", "1) ", "!", "[", "](", ")",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(window: Any) -> Iterator[Any]:
    """A tab with the module loaded: `draw(text)` and `grow(parts)` give the HTML that the browser would write."""
    tab = Tab(window)
    with serve(StandIn()) as server:
        tab.open(server.url)
        tab.page.evaluate("""async () => {
            const { render, Growing } = await import("/web/markdown.js");
            window.draw = (text) => {
                const box = document.createElement("div");
                box.append(render(text));
                return box.innerHTML;
            };
            window.link = (text) => { const a = render(text).querySelector("a"); return [a.href, a.textContent]; };
            window.grow = (parts) => {
                const box = document.createElement("div");
                const growing = new Growing(box);
                let text = "";
                for (const part of parts) growing.show(text += part);
                return box.innerHTML;
            };
        }""")
        yield tab.page
    assert tab.complaints == []
    tab.page.close()


@pytest.fixture
def draw(page: Any) -> Callable[[str], str]:
    return lambda text: str(page.evaluate("text => draw(text)", text))


def test_hostile_text_is_text(tab: Tab) -> None:
    engine = StandIn(ids_of(HOSTILE), config=StandInConfig(10**6))
    with serve(engine, limits=None) as server:
        page = tab.open(server.url)
        tab.ask(HOSTILE)
        tab.done()
        for _ in range(2):  # as it came, and as it is kept
            log = page.locator("#log")
            assert log.locator(SHOWN).count() == 0 and page.locator("body > h1").count() == 0
            assert page.evaluate("window.hacked") is None
            links = log.locator("a").evaluate_all("all => all.map(a => [a.protocol, a.rel, a.target])")
            assert links and all(link == ["https:", "noopener noreferrer nofollow", "_blank"] for link in links)
            assert "<script>window.hacked = 1</script>" in tab.answer.inner_text()
            assert page.locator(".turn.user .text").text_content() == HOSTILE
            page.reload()
            page.locator("#state.good").wait_for()
        page.get_by_role("button", name="Chats").click()
        assert page.locator("#chats-list").locator(SHOWN).count() == 0
        # and were there a call that makes elements of text, the browser would refuse it
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.querySelector('#log').innerHTML = '<b>x</b>'")
        assert all(url.startswith(server.url) for url in tab.requests)
        tab.complaints.clear()  # of that last call


def test_what_is_drawn(draw: Callable[[str], str]) -> None:
    for text, html in {
        "a *b* **c** ~~e~~": "<p>a <em>b</em> <strong>c</strong> <del>e</del></p>",
        "***d***": "<p><strong><em>d</em></strong></p>",
        "2 * 3 * 4, a_b_c, 5*x*y, **open": "<p>2 * 3 * 4, a_b_c, 5<em>x</em>y, **open</p>",
        "**a *b* c** and *a **b** c*": "<p><strong>a <em>b</em> c</strong> and <em>a <strong>b</strong> c</em></p>",
        "***a** b*": "<p>***a** b*</p>",
        "`a*b*` ``c ` d`` `open": "<p><code>a*b*</code> <code>c ` d</code> `open</p>",
        r"\*a\* \\ \x": r"<p>*a* \ \x</p>",
        "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
        "# A #\n####### b\n#c": "<h3>A</h3><p>####### b<br>#c</p>",
        "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
        "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
        "- a\n\n- b": "<ul><li>a</li><li>b</li></ul>",
        "> a\n> - b\n\nc": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>",
        "a\n***\nb": "<p>a</p><hr><p>b</p>",
        "&lt;b&gt; &amp;amp; &nope;": "<p>&lt;b&gt; &amp;amp; &amp;nope;</p>",
        "<b>a</b>": "<p>&lt;b&gt;a&lt;/b&gt;</p>",
    }.items():
        assert draw(text) == html, text


def test_code_and_tables_and_links(draw: Callable[[str], str], page: Any) -> None:
    code = draw("```py\na = *b*\n\n  <i>\n```\nafter")
    assert (
        "<span>py</span>" in code and "<code>a = *b*\n\n  &lt;i&gt;</code>" in code and code.endswith("<p>after</p>")
    )
    assert "<code>open\n``</code>" in draw("```\nopen\n``")
    table = draw("text\n| a | b |\n|:-|-:|\n| 1 | x \\| y |\n| 2 |\n\nend")
    assert table.startswith("<p>text</p>") and table.endswith("<p>end</p>") and table.count("<tr>") == 3
    assert '<td class="right">x | y</td>' in table and '<td class="right"></td>' in table
    for text, address, label in (
        ("see https://e.org/a_(b)?c=1.", "https://e.org/a_(b)?c=1", "https://e.org/a_(b)?c=1"),
        ("(https://e.org/a)", "https://e.org/a", "https://e.org/a"),
        ("<https://e.org/a>", "https://e.org/a", "https://e.org/a"),
        ("[*b* `c`](https://e.org/a_(b))", "https://e.org/a_(b)", "b c"),
        ("![pic](https://e.org/p.png)", "https://e.org/p.png", "image: pic"),
    ):
        assert page.evaluate("text => link(text)", text) == [address, label], text
    assert "<a" not in draw("xhttps://e.org [a](ftp://e.org) [b](/c) [d](https://) [e]\n(https//x)")


def test_growing_text_ends_like_whole_text(page: Any) -> None:
    """Drawn piece by piece as it streams, whatever is cut in two, it becomes what it is when drawn at once."""
    rng = random.Random(11)
    cases = []
    for _ in range(300):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 60)))
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
        cases.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])])
    cases += [list(c) for c in ("foo\n--- \nbar", "a\n1. b", "text\n|a|\n|-|x\n", "> q\n\n- [ ] t\n\n  p\n")]
    wrong = page.evaluate("cases => cases.filter(parts => grow(parts) !== draw(parts.join('')))", cases)
    assert wrong == []


@pytest.mark.long
def test_time_is_linear_in_the_text(page: Any) -> None:
    """What would take minutes if anything looked back each time: each of 100,000 characters or more."""
    n = 100_000
    texts = {
        "stars": "*a " * (n // 3), "mixed": "*a _b ~~c **d " * (n // 14), "ticks": "`a``b```c" * (n // 9),
        "brackets": "[" * n, "links": "[a](" * (n // 4), "pairs": "[](https://x" * (n // 12),
        "quotes": "> " * (n // 2), "items": "- " * (n // 2), "lines": "- a\n\n\n" * (n // 6),
        "blank": "- a" + "\n" * n, "table": "|a" * (n // 2) + "\n",
        "rows": "|a|\n|-|\n" + "|b|\n" * (n // 4), "fence": "```" + " " * n + "`", "hashes": "# " + "#" * n,
        "code": "`x` *" * (n // 5), "close": "*a" + "`x`" * (n // 3), "urls": "https://" * (n // 8),
        "spaces": " " * n + "x",
        "dashes": "- " + "-" * n + "x", "parens": "https://e.org/" + ")" * n, "amps": "&" * n, "slashes": "\\" * n,
    }  # fmt: skip
    took = page.evaluate(
        """texts => Object.fromEntries(Object.entries(texts).map(([name, text]) => {
            const begun = performance.now(); draw(text); return [name, performance.now() - begun];
        }))""",
        texts,
    )
    assert {name: ms for name, ms in took.items() if ms > 3000} == {}, json.dumps(took)
