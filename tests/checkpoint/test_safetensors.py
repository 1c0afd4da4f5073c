"""The container's header: what is read, and that every lie is one named error."""

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ds4.checkpoint.safetensors import load_arrays, parse_header, read_header
from ds4.errors import FileFormatError

ENTRIES: dict[str, Any] = {
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "empty": {"dtype": "I8", "shape": [0, 7], "data_offsets": [32, 32]},
    "c.scale": {"dtype": "F8_E8M0", "shape": [], "data_offsets": [32, 33]},
}


def text_of(entries: object) -> bytes:
    return json.dumps(entries).encode()


def parse(entries: object, data: int = 33) -> Any:
    text = entries if isinstance(entries, bytes) else text_of(entries)
    return parse_header(text, 8 + len(text) + data, Path("x.safetensors"))


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return ENTRIES | {name: ENTRIES[name] | fields}


def test_places_are_absolute_and_in_file_order() -> None:
    start = 8 + len(text_of(ENTRIES))
    infos = parse(dict(reversed(ENTRIES.items())) | {"__metadata__": {"format": "pt"}}, 33)
    start = 8 + len(text_of(dict(reversed(ENTRIES.items())) | {"__metadata__": {"format": "pt"}}))
    assert [(i.name, i.offset - start, i.nbytes) for i in infos.values()] == [
        ("a.weight", 0, 24), ("b", 24, 8), ("empty", 32, 0), ("c.scale", 32, 1),
    ]  # fmt: skip


def test_a_file_of_the_reference_writer(tmp_path: Path) -> None:
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array([-1, 5], np.int64)}
    save_file(arrays, tmp_path / "x.safetensors")
    got = load_arrays(tmp_path / "x.safetensors")
    assert got.keys() == arrays.keys()
    assert all(np.array_equal(got[k], v) and got[k].dtype == v.dtype for k, v in arrays.items())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (b"", "byte 8 must open the header"),
        (b"[1]", "byte 8 must open the header"),
        (b" {}", "byte 8 must open the header"),
        (b'{"a": ', "not JSON: .* near byte 14"),
        (b"{} trailing", "not JSON"),
        (b'{"a\xff": 1}', "not UTF-8 at byte 11"),
        (b'{"a": 1, "a": 1}', "name 'a' stands twice"),
        (b'{"a": {"dtype": "U8", "dtype": "U8"}}', "name 'dtype' stands twice"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": ' + b"[" * 50_000, "not usable"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "not usable"),
        ({"__metadata__": {"format": 1}}, "__metadata__ must be an object of strings"),
        ({"__metadata__": []}, "__metadata__ must be"),
        (ENTRIES | {"b": 3}, "tensor b must have exactly dtype, shape and data_offsets"),
        (changed("b", extra=1), "tensor b must have exactly"),
        (ENTRIES | {"b": {"dtype": "BF16", "shape": [4]}}, "tensor b must have exactly"),
        (changed("b", dtype="F8_E4M4"), "tensor b has unknown dtype 'F8_E4M4'"),
        (changed("b", dtype=7), "tensor b has unknown dtype 7"),
        (changed("b", dtype=["BF16"]), "unknown dtype"),
        (changed("b", shape=[-4]), r"tensor b has shape \[-4\]"),
        (changed("b", shape=[4.0]), r"tensor b has shape \[4.0\]"),
        (changed("b", shape=[True]), "tensor b has shape"),
        (changed("b", shape=4), "tensor b has shape 4"),
        (changed("b", shape=[1] * 9 + [4]), "up to 8"),
        (changed("b", shape=[2**64]), "tensor b has shape"),
        (changed("b", shape=[2**62, 2**62]), "tensor b: BF16 .* bytes, data_offsets 24..32 are not"),
        (changed("b", shape=[5]), "is 10 bytes, data_offsets 24..32 are not"),
        (changed("b", data_offsets=[24]), "data_offsets"),
        (changed("b", data_offsets=[24, 32, 40]), "data_offsets"),
        (changed("b", data_offsets=[-8, 0]), "tensor b has data_offsets"),
        (changed("b", data_offsets=[32, 24]), "data_offsets 32..24 are not"),
        (changed("b", data_offsets=[2**63, 2**63 + 8]), "tensor b has data_offsets"),
        (changed("b", data_offsets=[20, 28]), "tensor b at byte .* overlaps a.weight"),
        (changed("b", data_offsets=[0, 8]), "tensor a.weight at byte .* overlaps b"),
        (changed("b", data_offsets=[25, 33]), "tensor b .* leaves a hole of 1 bytes after a.weight|overlaps"),
        (changed("a.weight", data_offsets=[8, 32]), "leaves a hole of 8 bytes after the header|overlaps"),
        (ENTRIES | {"line\nbreak": ENTRIES["c.scale"]}, "not printable"),
        (ENTRIES | {"\ud800": ENTRIES["c.scale"]}, "not printable"),
    ],
)
def test_lies_are_named(entries: object, message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as error:
        parse(entries)
    assert str(error.value).startswith("x.safetensors: ")
    str(error.value).encode()  # a message can always be printed


def test_cut_and_surplus_data() -> None:
    with pytest.raises(FileFormatError, match=r"is cut off: tensor b needs bytes .*, the file has"):
        parse(ENTRIES, 30)
    with pytest.raises(FileFormatError, match="has 5 bytes after the last tensor"):
        parse(ENTRIES, 38)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is cut off: 0 bytes"),
        (b"\0" * 7, "is cut off: 7 bytes"),
        (struct.pack("<Q", 100), "the header ends at byte 108, the file at 8"),
        (struct.pack("<Q", 2**40), "give a header of 1099511627776 bytes; at most"),
        (b"\xff" * 8 + b"{}", "give a header of"),
    ],
)
def test_length_prefix(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(FileFormatError, match=message):
        read_header(tmp_path / "x.safetensors")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(FileFormatError, match="is a folder, not a regular file"):
        read_header(tmp_path)
    with pytest.raises(FileFormatError, match="is a device, not a regular file"):
        read_header(Path("/dev/null"))


def test_pipes_and_sockets_are_refused_before_they_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a pipe would wait for a writer for ever, so here opening anything is a failure."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    monkeypatch.chdir(tmp_path)  # a socket's path may have about 100 bytes
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("socket.safetensors")
        monkeypatch.setattr(Path, "open", Mock(side_effect=AssertionError("opened")))
        for kind in ("pipe", "socket"):
            with pytest.raises(FileFormatError, match=rf"{kind}\.safetensors: is a {kind}, not a regular file"):
                read_header(tmp_path / f"{kind}.safetensors")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_mutated_header_is_refused_or_describes_the_file(data: st.DataObject) -> None:
    """Bytes replaced, inserted or removed anywhere: an error of ours, or tensors that tile the data exactly."""
    text = bytearray(text_of(ENTRIES | {"__metadata__": {"k": "v"}}))
    total = 8 + len(text) + 33
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        piece = data.draw(st.binary(max_size=3) | st.sampled_from([b"9", b"-", b"0", b'"', b"}", b"e3", b"[", b","]))
        text[at : at + data.draw(st.integers(0, 2))] = piece
    try:
        infos = parse_header(bytes(text), total, Path("x.safetensors"))
    except FileFormatError:
        return
    end = 8 + len(text)
    for info in infos.values():
        assert info.offset == end
        end += info.nbytes
    assert end == total


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), v),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*ENTRIES, "new", "__metadata__"]), json_values)
def test_any_json_in_place_of_an_entry(name: str, value: Any) -> None:
    try:
        infos = parse(ENTRIES | {name: value})
    except FileFormatError:
        return
    assert sum(i.nbytes for i in infos.values()) == 33
