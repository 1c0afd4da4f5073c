"""The page at `/reports`: what is listed, what is shown, and what a report could do to whoever looks at it."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from ds4.cli.serve import parse
from ds4.errors import UsageError
from ds4.server.errors import HttpError
from ds4.server.reports import Reports, check_reports
from tests.server.standin import StandIn, ids_of, serve
from tests.web.conftest import Tab

EVIL = """<!doctype html><title>t</title><style>p { color: rgb(1, 2, 3) }</style><p>the report</p>
<script>document.querySelector("p").textContent = "hacked"; parent.hacked = 1</script>
<img src="ELSEWHERE/x.png" onerror="parent.hacked = 2"><iframe src="ELSEWHERE/x"></iframe>
<link rel="stylesheet" href="ELSEWHERE/x.css"><meta http-equiv="refresh" content="0; url=ELSEWHERE">"""
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="20"><script>parent.hacked=1</script></svg>'
MD = (
    "# Night\n\n| request | place |\n|---|---|\n| req_1 | 7 | <!-- 0123abcd -->\n\n<script>parent.hacked=1</script>\n"
)


def night(home: Path, below: str, name: str) -> None:
    folder = home / below / name
    folder.mkdir(parents=True)
    for kind, text in {"html": f"<p>night {name}</p>", "md": MD, "json": '{"a":[1]}'}.items():
        (folder / f"report.{kind}").write_text(text)
    (folder / "night.json").write_text("{}")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of nights."""
    made = tmp_path / "nightly"
    night(made, "nights", "2026-11-28")
    night(made, "nights", "2026-11-29")
    night(made, "rejected", "2026-11-30")
    (made / "nightly.json").write_text('{"kind": "ds4-nightly", "version": 1}')
    (made / "current").symlink_to("nights/2026-11-28")
    (made / "work" / "2026-12-01").mkdir(parents=True)
    (made / "work" / "2026-12-01" / "report.json").write_text('"a prompt of somebody"')
    row = {
        "at": "2026-11-29T03:30:00+00:00",
        "event": "accepted",
        "night": "2026-11-28",
        "before": None,
        "x": "untold",
    }
    (made / "history.jsonl").write_text(json.dumps(row) + "\n{torn")
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of reports, with what is none of the page's business beside and in it."""
    made = tmp_path / "reports"
    (made / "code").mkdir(parents=True)
    (made / "code" / "report.html").write_text(EVIL)
    (made / "code" / "report.md").write_text("# Code\n")
    (made / "loss of gates.svg").write_text(SVG)
    (made / "notes.txt").write_text("not a report")
    (made / ".hidden.json").write_text("{}")
    (tmp_path / "secret.json").write_text('"secret"')
    (made / "link.json").symlink_to(tmp_path / "secret.json")
    (made / "out").symlink_to(tmp_path)
    os.mkfifo(made / "pipe.json")
    return made


def names(reports: Reports) -> set[str]:
    told = json.loads(json.dumps(reports.listing()))
    return {name for r in told["reports"] for name in r["files"].values()}


def test_what_is_listed_and_nothing_else_can_be_read(folder: Path) -> None:
    reports = Reports(folder)
    listed = names(reports)
    assert listed == {"reports/code/report.html", "reports/code/report.md", "reports/loss of gates.svg"}
    titles = [r["title"] for r in json.loads(json.dumps(reports.listing()))["reports"]]
    assert sorted(titles) == ["code", "loss of gates"]
    assert reports.read("reports/loss of gates.svg") == (SVG.encode(), "image/svg+xml")
    for name in (
        "reports/link.json", "reports/out/secret.json", "reports/../secret.json", "reports/pipe.json", "/etc/passwd",
        "reports/notes.txt", "reports/.hidden.json", "code/report.html", "reports//code/report.html", "",
        "reports/\0", "reports/code/../code/report.html", "nights/nights/2026-11-28/report.md",
        "reports/%2e%2e/secret.json",
    ):  # fmt: skip
        with pytest.raises(HttpError) as told:
            reports.read(name)
        assert told.value.status == 404


def test_nights_show_their_reports_alone(home: Path, tmp_path: Path) -> None:
    """In a folder of nights of its own, and in one that lies among reports: the same, once."""
    for reports in (Reports(None, home), Reports(tmp_path, home), Reports(home, home)):
        listed = names(reports)
        assert len(listed) == 9 and not any("work" in n or "night.json" in n for n in listed)
        told = json.loads(json.dumps(reports.listing()))
        kinds = {r["title"]: (r["kind"], r["current"]) for r in told["reports"]}
        assert kinds == {
            "2026-11-28": ("night", True), "2026-11-29": ("night", False), "2026-11-30": ("rejected", False),
        }  # fmt: skip
        assert told["history"] == [
            {"at": "2026-11-29T03:30:00+00:00", "event": "accepted", "night": "2026-11-28", "before": None}
        ]  # fmt: skip
    other = tmp_path / "a-posttrain-folder"
    other.mkdir()
    (other / "report.md").write_text("not a folder of nights")
    assert names(Reports(None, other)) == set()


def test_a_later_mark_is_as_private(home: Path) -> None:
    (home / "nightly.json").write_text('{"kind": "ds4-nightly", "version": 2}')
    assert not any("work" in n for n in names(Reports(home)))


def test_the_flag(tmp_path: Path) -> None:
    assert parse(["-m", "x.gguf", "--reports", str(tmp_path)]).reports == str(tmp_path)
    with pytest.raises(UsageError, match=r"--reports .*nowhere: is not a folder"):
        check_reports(str(tmp_path / "nowhere"))


def test_files_are_served_with_guards_and_the_key(folder: Path) -> None:
    with serve(StandIn(), reports=Reports(folder), api_key="secret") as server:
        mine = {"Authorization": "Bearer secret"}
        for path in ("/report-files", "/report-files/reports/code/report.html"):
            assert server.get(path).status_code == 401
        listed = server.get("/report-files", headers=mine)
        assert listed.headers["cache-control"] == "no-store" and str(folder) not in listed.text
        page = server.get("/report-files/reports/code/report.html", headers=mine)
        assert page.text == EVIL and page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert (
            policy.startswith("sandbox; default-src 'none';") and page.headers["x-content-type-options"] == "nosniff"
        )
        gone = server.get("/report-files/reports/..%2f..%2fsecret.json", headers=mine)
        assert gone.status_code == 404 and gone.json()["error"]["code"] == "not_found"


def test_the_page(tab: Tab, folder: Path, home: Path) -> None:
    """Every format is shown, with the key, and none of them does anything."""
    elsewhere = socket.create_server(("127.0.0.1", 0))
    elsewhere.setblocking(False)
    address = f"http://127.0.0.1:{elsewhere.getsockname()[1]}"
    (folder / "code" / "report.html").write_text(EVIL.replace("ELSEWHERE", address))
    with elsewhere, serve(StandIn(), reports=Reports(folder, home), api_key="secret") as server:
        page = tab.page
        page.goto(server.url + "/reports")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="2026-11-28 mounted").wait_for()
        headings = page.locator("#list h2").all_inner_texts()
        assert headings == ["Nights", "Nights that were rejected", "Reports", "History"]
        page.get_by_role("link", name="code").click()
        frame = page.frame_locator("#view iframe")
        assert frame.locator("p").inner_text() == "the report"
        assert frame.locator("p").evaluate("e => getComputedStyle(e).color") == "rgb(1, 2, 3)"  # its style is its own
        page.get_by_role("link", name="loss of gates").click()
        page.locator("#view img").wait_for()
        assert page.locator("#view img").evaluate("e => e.decode().then(() => e.naturalWidth)") == 90
        page.get_by_role("link", name="2026-11-30").click()
        page.get_by_role("link", name="md", exact=True).click()
        page.get_by_text("req_1").wait_for()
        assert page.locator("#view tbody td").all_inner_texts() == ["req_1", "7"]  # digests are not shown
        assert page.get_by_text("<script>parent.hacked=1</script>").is_visible()
        page.get_by_role("link", name="json", exact=True).click()
        page.get_by_text('"a": [').wait_for()
        page.reload()  # the address names what is shown
        page.get_by_text('"a": [').wait_for()
        page.get_by_role("link", name="What happened").click()
        page.get_by_text("accepted").wait_for()
        assert page.locator("#view tbody td").all_inner_texts()[:2] == ["2026-11-29 03:30:00", "accepted"]
        page.set_viewport_size({"width": 360, "height": 640})
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("window.hacked") is None
        # the browser notes what it refused: the key at first, the report's script, image and event handler
        meant = ("status of 401", "Content Security Policy", "sandboxed")
        assert all(any(m in c for m in meant) for c in tab.complaints), tab.complaints
        tab.complaints.clear()
        page.close()
        with suppress(
            BlockingIOError
        ):  # the browser may open a connection before it asks whether it may; nothing is said
            while True:
                came, _ = elsewhere.accept()
                came.settimeout(0.3)
                with came, suppress(TimeoutError):
                    assert came.recv(100) == b""


def test_without_reports(tab: Tab) -> None:
    with serve(StandIn(ids_of("ok"))) as server:
        tab.page.goto(server.url + "/reports")
        tab.page.get_by_text("without --reports DIR").wait_for()
        tab.page.get_by_role("link", name="Chat").click()
        tab.page.locator("#state.good").wait_for()
