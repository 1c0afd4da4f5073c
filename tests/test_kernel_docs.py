"""docs/kernels.md is what the launch table and the compiler say now, and a small launch says why it is small."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4.device.build import Builder, Resources, default_cuda_dir
from ds4.device.kernels import Kernel, all_kernels
from ds4.device.report import Line, line, lines, missing, render, resident_blocks
from ds4.settings import device_settings

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"


@pytest.fixture(scope="module")
def made() -> list[Line]:
    settings = device_settings()
    return lines(all_kernels(), Builder(settings.cuda_dir or default_cuda_dir(), settings.cache, settings.cxx))


def test_every_row_has_what_the_document_shows() -> None:
    assert [text for row in all_kernels() for text in missing(row)] == []


def test_the_document_is_up_to_date(made: list[Line]) -> None:
    assert DOCUMENT.read_text() == render(made), "run python -m ds4.device.report"


def test_few_blocks_or_bytes_in_flight_have_a_reason(made: list[Line]) -> None:
    without = [
        f"{m.kernel.name}: {m.blocks} blocks, {m.in_flight} bytes in flight"
        for m in made
        if m.needs_reason and len(m.kernel.reason) < 20
    ]
    assert without == []


ROW = Kernel(
    name="k",
    source="k.cu",
    grid=lambda R, D: (R, D, 1),
    block=256,
    args=("y: f32[R]",),
    smem=lambda D, W=2: 1024 * D * W,
    traffic=lambda R, D: (4 * R * D, 4 * R),
    released={"R": 100, "D": 3},
    in_flight=2048,
)


def test_figures_of_a_row() -> None:
    got = line(ROW, Resources(registers=40, stack=0, spill_stores=0, spill_loads=0, static_smem=100))
    assert (got.blocks, got.smem, got.registers, got.read, got.written) == (300, 6244, 40, 1200, 400)
    # 256 threads of 40 registers: 6 of 65,536; 6,244 + 1,024 bytes: 14 of 100 KB; 1,536 threads: 6
    assert got.in_flight == 6 * 2048 and not got.needs_reason
    few = Line(ROW, blocks=47, smem=0, registers=40, in_flight=9000, read=0, written=0)
    assert few.needs_reason and "" in render([few])


def test_a_small_grid_does_not_fill_a_multiprocessor() -> None:
    small = Kernel(**{**vars(ROW), "released": {"R": 50, "D": 1}})
    assert line(small, Resources(40, 0, 0, 0, 0)).in_flight == 2 * 2048  # 50 blocks on 48: two at most


@pytest.mark.parametrize(
    ("threads", "registers", "smem", "blocks"),
    [(1024, 64, 0, 1), (1024, 32, 0, 1), (128, 32, 0, 12), (32, 16, 0, 24), (256, 255, 0, 1), (64, 24, 50 * 1024, 1)],
)
def test_blocks_that_fit_a_multiprocessor(threads: int, registers: int, smem: int, blocks: int) -> None:
    assert resident_blocks(threads, registers, smem) == blocks


def test_what_is_missing_is_listed() -> None:
    bare = Kernel(**{**vars(ROW), "released": {"R": 1}, "traffic": None, "in_flight": 0, "constants": ("HC",)})
    said = missing(bare)
    for text in ("no D (", "no HC (constants)", "no `traffic`", "no `in_flight`"):
        assert any(text in s for s in said), (text, said)
    assert missing(ROW) == []
