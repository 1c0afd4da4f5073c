"""The sidecars that ds4 comes with: whole, of the embedded model, by the recipe; their figures, and the page."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ds4 import embedded
from ds4.base.reader import Base
from ds4.cli import shipped as tool
from ds4.cli.domain import SHIPPED, read_shipped, shipped
from ds4.cli.embedded_base import embedded_base
from ds4.cli.main import run as ds4
from ds4.corpus.domain import Domain
from ds4.errors import FileFormatError, UsageError
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from ds4.teacher.source import BaseSource
from rulers.identity import model_fingerprint
from solvers.sidecar import report

RECIPE = tool.Recipe.load(SHIPPED / tool.RECIPE)
NAMES = shipped()


@pytest.fixture(scope="module")
def base() -> Path:
    return embedded_base()


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SHIPPED / name / "manifest.json").read_bytes())
    return found


def test_every_domain_has_one() -> None:
    assert embedded.domains() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_is_whole_and_by_the_recipe(name: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, told = SHIPPED / name, manifest(name)
    assert any(file.endswith(".bin") for file in read_shipped(folder))
    n_layers = len(told["layers"])
    assert told["fingerprint"] == format_fingerprint(*sidecar_fingerprint(folder, n_layers)).strip()
    assert (folder / "manifest.txt").read_text() == report(told)
    opened = Base.open(base, embedded.checkpoint())
    assert n_layers == opened.config.num_hidden_layers
    assert told["model"] == model_fingerprint(BaseSource(opened))
    assert told["base"].startswith(f"{base.name} ")  # and its bytes' mark, which the kind of CPU decides with them
    wanted = RECIPE.solve["tokens"] + (RECIPE.solve["beside_tokens"] if told["beside"] else 0)
    assert told["tokens"] == pytest.approx(wanted, rel=0.12)  # whole windows, evenly over the slice
    assert (told["domain"], told["way"], told["length"]) == (name, RECIPE.solve["way"], RECIPE.solve["length"])
    assert told["slice_sha256"] == Domain.open(name).sha256("fit")
    beside = None if told["beside"] is None else told["beside"]["domain"]
    assert beside == (None if name == RECIPE.solve["beside"] else RECIPE.solve["beside"])
    assert ds4(["sidecar", "verify", str(folder), "-m", str(base), "--engram-dir", str(embedded.checkpoint())]) == 0
    assert "mounts as --zchain" in capsys.readouterr().out


def test_the_page_says_what_was_read() -> None:
    """And what was read are these files: a sidecar that was made anew has to be read anew."""
    figures, text = tool.load_figures(SHIPPED), (SHIPPED / tool.PAGE).read_text()
    assert text == tool.page(text, figures), "run python -m ds4.cli.shipped figures"
    assert figures["read"] == RECIPE.read and figures["beside"] == RECIPE.solve["beside"]
    assert set(figures["domains"]) == {*NAMES}
    for name, entry in figures["domains"].items():
        assert entry["fingerprint"] == manifest(name)["fingerprint"]
        for figure, part in tool.NAMED[:3]:
            change = entry["with"][figure][part] - entry["base"][figure][part]
            assert change == pytest.approx(entry["difference"][figure][part], abs=1e-9)


NUMBERS = {
    "tokens": 100, "same_top1": {"mean": 0.8, "se": 0.01},
    "sigma_min": {"mean": 0.7, "se": 0.01, "median": 0.75, "p5": 0.2}, "kl": {"mean": 0.3, "se": 0.02},
    "ppl_ratio": {"value": 1.2, "se": 0.02},
}  # fmt: skip


def test_which_figures_count_as_the_same() -> None:
    assert tool.strays(NUMBERS, NUMBERS) == []
    for figure, part in (*tool.NAMED, *tool.SPREAD):
        se: float = NUMBERS[figure]["se"]  # type: ignore[index]
        for share, strays in ((0.09, 0), (0.11, 1), (-0.11, 1), (float("nan"), 1)):
            other: Any = copy.deepcopy(NUMBERS)
            other[figure][part] += share * se
            assert len(tool.strays(NUMBERS, other)) == strays
    assert len(tool.strays(NUMBERS, {**NUMBERS, "tokens": 99})) == 1


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder like sidecars/ with one of them."""
    for name in (tool.RECIPE, tool.PAGE):
        shutil.copy(SHIPPED / name, tmp_path / name)
    shutil.copytree(SHIPPED / NAMES[0], tmp_path / NAMES[0])
    return tmp_path


def test_check_tells_bytes_figures_and_neither(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With stand-ins for the solve and the reading: the long tests run both."""
    name, changed, numbers = NAMES[0], False, copy.deepcopy(NUMBERS)

    def solve(recipe: tool.Recipe, domain: str, out: Path) -> None:
        shutil.copytree(home / domain, out)
        if changed:
            (out / "gr_L01.bin").write_bytes(b"other")

    class Read:
        class numbers:
            @staticmethod
            def to_json() -> Any:
                return numbers

    monkeypatch.setattr(tool, "solve", solve)
    monkeypatch.setattr(tool, "reading", lambda *_: Read)
    argv = ["check", "--sidecars", str(home)]
    assert tool.run(argv) == 0 and capsys.readouterr().out == f"{name}: the same bytes\n"
    changed = True
    with pytest.raises(FileFormatError, match=r"figures\.json: cannot be read"):
        tool.run(argv)
    entry = {"with": NUMBERS, "made_with": tool.blas_kind()}
    (home / tool.FIGURES).write_text(json.dumps({"domains": {name: entry}}))
    capsys.readouterr()
    assert tool.run(argv) == 1  # the same kind of CPU, and other bytes: no figures excuse that
    assert capsys.readouterr().out.startswith(f"{name}: gr_L01.bin has other bytes, made with ")
    (home / tool.FIGURES).write_text(json.dumps({"domains": {name: {**entry, "made_with": "another kind"}}}))
    assert tool.run(argv) == 0
    assert capsys.readouterr().out == (
        f"{name}: gr_L01.bin has other bytes; reading what was made\n{name}: the same five figures\n"
    )
    numbers["kl"]["mean"] = 0.5  # type: ignore[index]
    assert tool.run(argv) == 1
    assert "kl mean is 0.500000, told is 0.300000" in capsys.readouterr().out


def test_bad_input_is_named(home: Path) -> None:
    with pytest.raises(UsageError, match=f"--domain poetry: is not there; there are {NAMES[0]}"):
        tool.run(["check", "--sidecars", str(home), "--domain", "poetry"])
    with pytest.raises(UsageError, match="has no recipe"):
        tool.run(["check", "--sidecars", str(home / NAMES[0])])
    with pytest.raises(FileFormatError, match=r"README\.md: has no"):
        tool.page("no marks", {"domains": {}})
    recipe = home / tool.RECIPE
    text = recipe.read_text()
    for spoilt in (text.replace("way", "ways"), text.replace("8192", "'many'"), text + "[more]\n", "=", ""):
        recipe.write_text(spoilt)
        with pytest.raises(FileFormatError, match=r"recipe\.toml"):
            tool.run(["check", "--sidecars", str(home)])
    recipe.write_text(text)
    (home / NAMES[0] / "gr_L00.bin").write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"gr_L00\.bin: is not the file that manifest\.json lists"):
        tool.run(["check", "--sidecars", str(home)])


@pytest.mark.long
def test_one_is_made_again_byte_for_byte(capsys: pytest.CaptureFixture[str]) -> None:
    """On another kind of CPU than that of sidecars/: to the same five figures."""
    assert tool.run(["check", "--domain", "code"]) == 0
    assert "code: the same" in capsys.readouterr().out
