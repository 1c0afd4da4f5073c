"""Rules that kernel sources keep, because the CPU driver can only check what goes through its types.

A raw pointer or a raw `__shared__` array would be invisible to bounds, race and traffic checks. A kernel that is not
in the launch table does not exist, and a row without a kernel is a lie. Headers say what a reader must know, under
fixed headings.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from ds4.device.build import default_cuda_dir
from ds4.device.kernels import Kernel, all_kernels
from ds4.device.launch import parse_argument, signature

CUDA = default_cuda_dir()
SOURCES = sorted(CUDA.glob("*.cu"))
SHARED_CODE = sorted(p for p in CUDA.glob("*.cuh") if p.name != "common.cuh")
HEADINGS = ("Layout", "Launch", "Arithmetic", "Traffic", "Why so")
KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\((?P<bounds>[^)]*(?:\([^)]*\)[^)]*)*)\)\s*)?'
    r"(?P<name>\w+)\s*\((?P<params>[^)]*(?:\([^)]*\)[^)]*)*)\)\s*\{",
)
BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.S)
TYPES = (
    "void|float|double|int|unsigned|char|short|long|bool|u8|u16|u32|u64|i8|i16|i32|i64|bf16|f16|uint[248]?|float[24]"
    "|T|A|B|V"
)
RAW_POINTER = re.compile(rf"\b(?:{TYPES})\s*(?:const\s*)?\*+\s*(?:const\s+|__restrict__\s+)*[A-Za-z_)>,]")
CAST = re.compile(r"\breinterpret_cast\b|\(\s*(?:const\s+)?\w+\s*\*\s*\)")
C_TYPES = {
    "f32": "float", "bf16": "bf16", "f16": "f16", "i32": "i32", "u32": "u32", "i64": "i64", "u64": "u64", "u8": "u8",
    "i8": "i8", "u16": "u16",
}  # fmt: skip
SPELLINGS = {
    "int": "i32", "unsigned": "u32", "unsigned int": "u32", "long long": "i64", "unsigned long long": "u64",
    "unsigned char": "u8",
}  # fmt: skip


def code(text: str) -> str:
    """Without comments and strings; macros' continuation lines joined."""
    text = BLOCK_COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', lambda m: m[0] if m[0] in ('"C"', '"common.cuh"') else '""', text)


def pointer_faults(text: str) -> list[str]:
    """Lines with a raw pointer type or cast."""
    lines = code(text).splitlines()
    return [
        f"{n}: {line.strip()}" for n, line in enumerate(lines, 1) if RAW_POINTER.search(line) or CAST.search(line)
    ]


def parameters(text: str) -> list[tuple[str, str]]:
    """(type, name) of a kernel's parameters, types in our spelling."""
    found = []
    for part in re.split(r",(?![^<]*>)", re.sub(r"\s+", " ", text).strip()):
        kind, _, name = part.strip().rpartition(" ")
        kind = re.sub(r"\bconst\b", "", kind).strip()
        pointer = re.fullmatch(r"gptr<\s*(.+?)\s*>", kind)
        inner = (pointer[1] if pointer else kind).strip()
        inner = SPELLINGS.get(inner, inner)
        found.append((f"gptr<{inner}>" if pointer else inner, name))
    return [] if found == [("", "")] else found


@pytest.mark.parametrize("path", [*SOURCES, *SHARED_CODE], ids=lambda p: p.name)
def test_memory_is_reached_through_checked_types(path: Path) -> None:
    text = path.read_text()
    assert pointer_faults(text) == []
    assert "__shared__" not in code(text), "shared memory is declared by SMEM or SMEM_DYN"
    for word in ("printf", "asm", "__syncthreads", "cooperative_groups", "clock64"):
        assert not re.search(rf"\b{word}\b", code(text)), f"{word}: not in a kernel; see cuda/lib"


@pytest.mark.parametrize("path", [*SOURCES, *SHARED_CODE], ids=lambda p: p.name)
def test_only_our_own_headers_are_included(path: Path) -> None:
    found = re.findall(r"^\s*#\s*include\s*(\S+)", path.read_text(), re.M)
    ours = {f'"{p.name}"' for p in CUDA.glob("*.cuh")}
    assert set(found) <= ours
    if path.suffix == ".cu":
        assert found, "common.cuh is missing"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_the_header_has_its_headings_in_order(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"/* {path.name} - "), "a source opens with a comment: its name, what it is"
    head = text[: text.index("*/")]
    places = [head.find(f"\n * {heading}") for heading in HEADINGS]
    assert -1 not in places, f"missing: {[h for h, p in zip(HEADINGS, places) if p < 0]}"
    assert places == sorted(places), f"the order is {HEADINGS}"


def test_every_kernel_is_in_the_table_and_exported() -> None:
    """Those that macros make are compared by tests/cuda/test_compile.py, from the compiler's own list."""
    rows = {(row.source, row.name) for row in all_kernels()}
    for path in SOURCES:
        text = code(path.read_text())
        defined = {(path.name, m["name"]) for m in KERNEL.finditer(text) if not is_macro(text, m)}
        exported = {(path.name, name) for name in re.findall(r"^EXPORT\((\w+)\)", text, re.M)}
        assert defined - rows == set(), "kernels that are not in the launch table"
        assert exported - rows == set(), "exported kernels that are not in the launch table"
        assert defined - exported == set(), "kernels without EXPORT"


def is_macro(text: str, m: re.Match[str]) -> bool:
    """Whether a kernel's definition is the body of a macro: its name is an argument, or pasted."""
    start = text.rfind("\n", 0, m.start()) + 1
    lines = text[:start].splitlines()
    return (bool(lines) and lines[-1].rstrip().endswith("\\")) or text[start:].lstrip().startswith("#define")


def test_a_row_says_what_its_kernel_says() -> None:
    """Types and order of the arguments, and the block size, as far as they are written out."""
    wrong = []
    for row in all_kernels():
        text = code((CUDA / row.source).read_text())
        for m in KERNEL.finditer(text):
            if m["name"] != row.name or is_macro(text, m):
                continue
            arguments = [parse_argument(row.name, a) for a in row.args]
            wanted = [C_TYPES[a.kind] if a.dims is None else f"gptr<{C_TYPES[a.kind]}>" for a in arguments]
            wanted = [SPELLINGS.get(w, w) for w in wanted]
            found = [kind for kind, _ in parameters(m["params"])]
            if found != wanted:
                wrong.append(f"{row.name}: the table has {wanted}, {row.source} has {found}")
            bounds = (m["bounds"] or "").split(",")[0].strip()
            named = re.search(rf"constexpr int {bounds} = (\d+);", text) if bounds.isidentifier() else None
            threads = int(named[1]) if named else int(bounds) if bounds.isdecimal() else None
            if threads is None or threads != row.block:
                wrong.append(f"{row.name}: block {row.block}, but __launch_bounds__({m['bounds']})")
    assert wrong == []


def test_rows_of_one_file_are_compiled_together() -> None:
    """One file, one module: all its rows list the same constants, at the same released values."""
    sets: dict[tuple[str, tuple[str, ...]], set[tuple[tuple[str, int | None], ...]]] = defaultdict(set)
    for row in all_kernels():
        released = row.released or {}
        values = tuple((name, released.get(name)) for name in row.constants)
        sets[row.source, row.defines].add(values)
    assert {key: found for key, found in sets.items() if len(found) > 1} == {}


def test_rows_are_well_formed() -> None:
    for row in all_kernels():
        assert signature(row).arguments, row.name
        assert 32 <= row.block <= 1024 and row.block % 32 == 0, row.name


# -- the rules themselves


BAD = {
    "raw parameter": 'extern "C" __global__ void k(float* y) {',
    "const parameter": 'extern "C" __global__ void k(const float *y) {',
    "void pointer": "DEV void f(const void* p);",
    "cast": "u32 v = *(u32 *)&x;",
    "reinterpret": "auto q = reinterpret_cast<uint4*>(p);",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_raw_pointer_is_noticed(text: str) -> None:
    assert pointer_faults(text) != []


def test_arithmetic_is_not_a_pointer() -> None:
    good = "float a = x * y; i64 row = (i64)blockIdx.x * width; acc[i] = (float)n * w; // float* in a comment\n"
    assert pointer_faults(good + "gptr<const float> p = q + 3; int n = 4 * k; T s = T(2) * v;") == []


def test_parameters_are_read() -> None:
    assert parameters("gptr<float> y, gptr<const bf16> x, int n, const float eps, i64 at") == [
        ("gptr<float>", "y"), ("gptr<bf16>", "x"), ("i32", "n"), ("float", "eps"), ("i64", "at"),
    ]  # fmt: skip


def test_a_row_is_a_kernel() -> None:
    assert all(isinstance(row, Kernel) for row in all_kernels())
