"""What is kept stays on this machine: nothing that runs can open a connection, but for those that ask a server of
this machine how it is, or for its device (test_borrow.py shows that the latter goes to no other machine), and
`ds4 fetch`.
"""

from __future__ import annotations

import ast
import re

from tests.test_floors import SOURCES, imports, module_of

CLIENTS = re.compile(
    r"(socket|ssl|http\.client|urllib\.request|ftplib|smtplib|poplib|imaplib|telnetlib|xmlrpc|requests|httpx2?|aiohttp|huggingface_hub|hf_xet)\b"
)
CONNECTING = {"open_connection", "create_connection", "connect", "sendto", "create_datagram_endpoint"}
# the socket that listens; `ds4 status` and the like, `ds4 doctor` and `ds4 nightly`, which ask this machine's server;
# `ds4 fetch`, which asks a hub for files and sends it nothing but their names
MAY = {
    "ds4.server.listen", "ds4.cli.service", "ds4.cli.probes", "ds4.posttrain.borrow", "ds4.hub.client",
    "ds4.hub.chunks",
}  # fmt: skip


def connections(module: str, text: str) -> list[str]:
    """What of `module` could open one."""
    clients = [name for name in imports(text, module) if CLIENTS.match(name)]
    attributes = [n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)]
    return clients + [name for name in attributes if name in CONNECTING]


def test_no_module_connects() -> None:
    found = {module_of(path): connections(module_of(path), path.read_text()) for path in SOURCES}
    assert {module: names for module, names in found.items() if names and module not in MAY} == {}
    assert len(found) > 100 and all(found[module] for module in MAY)  # they were looked at, and the rule finds them


def test_the_rule_itself() -> None:
    assert connections("ds4.x", "from urllib.request import urlopen") == ["urllib.request.urlopen"]
    assert connections("ds4.x", "import asyncio\nasyncio.open_connection('h', 1)") == ["open_connection"]
    assert connections("ds4.x", "import urllib.parse") == []
