"""The pages' files, without a browser: what is open, what is guarded, and that all of them come along."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import httpx

from ds4.server.pages import HOME, TYPES, read_assets
from tests.server.standin import StandIn, ids_of, serve

ROOT = Path(__file__).resolve().parent.parent.parent


def test_pages_are_open_and_data_is_not() -> None:
    with serve(StandIn(ids_of("ok")), api_key="secret") as server, httpx.Client(base_url=server.url) as client:
        for path in ("/", "/reports", *(f"/web/{name}" for name in read_assets() if not name.endswith(".html"))):
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["content-type"].startswith(TYPES.get(Path(path).suffix, "text/html")), path
            policy = answer.headers["content-security-policy"]
            assert (
                "default-src 'none'" in policy and "script-src 'self';" in policy and "trusted-types 'none'" in policy
            )
            assert "frame-ancestors 'none'" in policy and answer.headers["x-content-type-options"] == "nosniff"
            assert ("'unsafe-inline'" in policy) == (path == "/reports")
            head = client.head(path)
            assert head.status_code == 200 and head.content == b"" and head.headers["etag"] == answer.headers["etag"]
            again = client.get(path, headers={"If-None-Match": f'"x", W/{answer.headers["etag"]}'})
            assert again.status_code == 304 and again.content == b""
            assert client.get(path, headers={"If-None-Match": '"x"'}).status_code == 200
        for path in ("/v1/models", "/report-files", "/metrics"):
            assert client.get(path).status_code == 401


def test_nothing_else_is_there() -> None:
    with serve(StandIn()) as server, httpx.Client(base_url=server.url) as client:
        for path in (
            "/web/", "/web/app.py", "/web/index.html", "/web/../pages.py", "/web/%2e%2e/pages.py",
            "/web/..%2fpages.py", "/web", "/web/app.js/", "/web//app.js", "/reports/", "/report-files/",
        ):  # fmt: skip
            assert client.get(path).status_code == 404, path
        assert client.post("/", content=b"{}").status_code == 405


def test_every_file_is_of_use_and_in_the_distribution() -> None:
    """What a page names is there, what is there is named, and an installed server has it."""
    assets = read_assets()
    assert set(assets) == {p.name for p in HOME.iterdir()}
    texts = {name: asset.body.decode() for name, asset in assets.items()}
    pages = [n for n in texts if n.endswith(".html")]
    named = {n for page in pages for n in re.findall(r'(?:href|src)="/web/([\w.]+)"', texts[page])}
    named |= {n for text in texts.values() for n in re.findall(r'from "\./([\w.]+)"', text)}
    assert named | set(pages) == set(texts)
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = table["package-data"]["ds4.server"]
    assert all(any((HOME / n).match(p) for p in patterns) for n in texts)


def test_the_pages_fetch_nothing_from_elsewhere() -> None:
    """No address of another host, and no call that makes elements or code of a text."""
    for name, asset in read_assets().items():
        text = asset.body.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert re.findall(r"https?://[\w.]+", text) == [], name
        calls = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|<script>|\son\w+="
        )
        assert re.findall(calls, text) == [], name
