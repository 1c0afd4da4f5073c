"""gguf.py: against the `gguf` package both ways, and every refusal of a hand-made file."""

import os
import struct
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4.base import codecs
from ds4.base.gguf import Container, Value, header_bytes, read_container
from ds4.base.types import BF16, F16, F32, FP4X32, FP8_32X32, I32, I64, Q4_K, Q8_0, TYPES, VQBLOB, tensor_bytes
from ds4.errors import FileFormatError

METADATA = {
    "general.architecture": Value("str", "deepseek4"),
    "a.u8": Value("u8", 200), "a.i8": Value("i8", -5), "a.u16": Value("u16", 60000), "a.i16": Value("i16", -3),
    "a.u32": Value("u32", 4_000_000_000), "a.i32": Value("i32", -7), "a.f32": Value("f32", 0.25),
    "a.bool": Value("bool", True), "a.u64": Value("u64", 2**63 + 5), "a.i64": Value("i64", -(2**40)),
    "a.f64": Value("f64", 1e-300), "a.str": Value("str", "größe｜"), "a.empty": Value("[i32]", []),
    "a.ints": Value("[i32]", [1, -2, 3]), "a.longs": Value("[u64]", [2**40]), "a.floats": Value("[f32]", [1.5, -2.0]),
    "a.bools": Value("[bool]", [True, False]), "a.strings": Value("[str]", ["Ġa", "", "｜"]),
}  # fmt: skip
TENSORS: list[tuple[str, int, tuple[int, ...]]] = [
    ("f32", F32, (5, 3)),
    ("bf16", BF16, (7,)),
    ("q8", Q8_0, (64, 3)),
    ("q4k", Q4_K, (512, 2)),
    ("i64", I64, (2, 3, 2)),
    ("i32", I32, (9,)),
    ("f16", F16, (3, 5)),
]


def write(path: Path, metadata: dict[str, Value], tensors: list[tuple[str, int, tuple[int, ...]]]) -> list[bytes]:
    head, offsets, size = header_bytes(metadata, tensors)
    rng = np.random.default_rng(0)
    data = [rng.bytes(tensor_bytes(t, dims, n)) for n, t, dims in tensors]
    with open(path, "wb") as f:
        f.write(head)
        for offset, raw in zip(offsets, data, strict=True):
            f.seek(offset)
            f.write(raw)
        f.truncate(size)
    return data


def test_the_gguf_package_reads_what_we_write(tmp_path: Path) -> None:
    data = write(tmp_path / "x.gguf", METADATA, TENSORS)
    r = gguf.GGUFReader(tmp_path / "x.gguf")
    for key, v in METADATA.items():
        if key != "a.empty":  # the package cannot read an empty array
            got = r.fields[key].contents()
            assert got == pytest.approx(v.value) if v.kind in ("f32", "f64") else got == v.value, key
    for t, raw, (name, type_id, dims) in zip(r.tensors, data, TENSORS, strict=True):
        assert (t.name, int(t.tensor_type), tuple(int(d) for d in t.shape)) == (name, type_id, dims)
        assert t.data.tobytes() == raw


def test_we_read_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    w = gguf.GGUFWriter(path, "deepseek4")
    w.add_uint32("a.u32", 7)
    w.add_float32("a.f32", 1e-20)
    w.add_bool("a.bool", False)
    w.add_array("a.strings", ["x", "yz"])
    w.add_array("a.ints", [1, 2, -3])
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    w.add_tensor("x", x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    c = read_container(path)
    assert c.metadata["a.u32"] == 7 and c.metadata["a.bool"] is False and c.metadata["a.strings"] == ["x", "yz"]
    assert list(c.metadata["a.ints"]) == [1, 2, -3] and np.float32(c.metadata["a.f32"]) == np.float32(1e-20)
    t = c.tensors["x"]
    assert t.dims == (5, 3) and path.read_bytes()[t.offset : t.offset + t.nbytes] == x.tobytes()


def test_our_own_round_trip(tmp_path: Path) -> None:
    ours = [("blob", VQBLOB, (101,)), ("fp4", FP4X32, (64, 3)), ("fp8", FP8_32X32, (64, 96)), *TENSORS]
    data = write(tmp_path / "x.gguf", METADATA, ours)
    c = read_container(tmp_path / "x.gguf")
    for key, v in METADATA.items():
        got = c.metadata[key]
        assert c.kinds[key] == v.kind
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == v.value, key
    raw = (tmp_path / "x.gguf").read_bytes()
    for (name, type_id, dims), want in zip(ours, data, strict=True):
        t = c.tensors[name]
        assert (t.type_id, t.dims, raw[t.offset : t.offset + t.nbytes]) == (type_id, dims, want)
        assert t.offset % 32 == 0


def test_sizes_of_the_specification() -> None:
    assert tensor_bytes(FP4X32, (5120, 384), "x") == 5120 * 384 // 32 * 17
    assert tensor_bytes(FP8_32X32, (6144, 25600), "x") == 6144 * 25600 // 1024 * 1025
    assert tensor_bytes(Q4_K, (5120, 129280), "x") == 5120 * 129280 // 256 * 144
    for type_id, dims in ((FP8_32X32, (64, 16)), (FP8_32X32, (48, 64)), (Q4_K, (128, 2)), (FP4X32, (40,))):
        with pytest.raises(FileFormatError, match=TYPES[type_id].name):
            tensor_bytes(type_id, dims, "x")
    assert not {40, 41} & set(TYPES)  # ids that the gguf package gives to other types


# ---- one tiny file, byte by byte ----


def string(s: bytes) -> bytes:
    return struct.pack("<Q", len(s)) + s


def key(name: bytes, type_id: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + value


def info(name: bytes, dims: list[int], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def tiny(keys: list[bytes], infos: list[bytes], data: bytes, *, version: int = 3, n: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos) if n is None else n, len(keys)) + b"".join(keys + infos)
    return head + bytes(-len(head) % 32) + data


U32 = struct.pack("<I", 5)
GOOD = [info(b"a", [4], 0, 0), info(b"b", [2, 2], 0, 32)]
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "magic": (b"GGUX" + tiny([], GOOD, bytes(48))[4:], "not a GGUF"),
    "version 2": (tiny([], GOOD, bytes(48), version=2), "version 2"),
    "big-endian": (tiny([], GOOD, bytes(48), version=3 << 24), "big-endian"),
    "tensor count huge": (tiny([], GOOD, bytes(48), n=2**63), "do not fit"),
    "tensor count one too many": (tiny([], GOOD, bytes(96), n=3), "tensor 2"),
    "key type": (tiny([key(b"k", 13, U32)], GOOD, bytes(48)), "value type 13"),
    "array type": (tiny([key(b"k", 9, struct.pack("<IQ", 99, 1) + U32)], GOOD, bytes(48)), "value type 99"),
    "nested array": (tiny([key(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(12))], GOOD, bytes(48)), "nested"),
    "array huge": (tiny([key(b"k", 9, struct.pack("<IQ", 4, 2**62))], GOOD, bytes(48)), "past"),
    "array negative": (tiny([key(b"k", 9, struct.pack("<Iq", 4, -1))], GOOD, bytes(48)), "past"),
    "strings huge": (tiny([key(b"k", 9, struct.pack("<IQ", 8, 2**61))], GOOD, bytes(48)), "do not fit"),
    "string huge": (tiny([key(b"k", 8, struct.pack("<Q", 2**62))], GOOD, bytes(48)), "claims|past"),
    "string negative": (tiny([key(b"k", 8, struct.pack("<q", -4))], GOOD, bytes(48)), "claims"),
    "string not utf-8": (tiny([key(b"k", 8, string(b"\xff\xfe"))], GOOD, bytes(48)), "UTF-8"),
    "key not utf-8": (tiny([key(b"\xc3", 4, U32)], GOOD, bytes(48)), "UTF-8"),
    "key name huge": (tiny([struct.pack("<Q", 2**40) + bytes(32)], GOOD, bytes(48)), "claims"),
    "key twice": (tiny([key(b"k", 4, U32)] * 2, GOOD, bytes(48)), "twice"),
    "bool of 2": (tiny([key(b"k", 7, b"\x02")], GOOD, bytes(48)), "bool"),
    "bools of 2": (tiny([key(b"k", 9, struct.pack("<IQ", 7, 2) + b"\1\2")], GOOD, bytes(48)), "bool"),
    "alignment 0": (tiny([key(b"general.alignment", 4, bytes(4))], GOOD, bytes(48)), "alignment is 0"),
    "alignment 24": (tiny([key(b"general.alignment", 4, struct.pack("<I", 24))], GOOD, bytes(48)), "alignment is 24"),
    "alignment text": (tiny([key(b"general.alignment", 8, string(b"32"))], GOOD, bytes(48)), "alignment"),
    "no dims": (tiny([], [info(b"a", [], 0, 0)], bytes(48)), "0 dimensions"),
    "five dims": (tiny([], [info(b"a", [1] * 5, 0, 0)], bytes(48)), "5 dimensions"),
    "dims count huge": (tiny([], [string(b"a") + struct.pack("<I", 2**32 - 1) + bytes(64)], bytes(48)), "dimensions"),
    "dim 0": (tiny([], [info(b"a", [4, 0], 0, 0)], bytes(48)), "impossible dims"),
    "dims overflow": (tiny([], [info(b"a", [2**32, 2**32], 0, 0)], bytes(48)), "impossible dims"),
    "dim negative": (tiny([], [info(b"a", [2**64 - 4], 0, 0)], bytes(48)), "impossible dims"),
    "type 40": (tiny([], [info(b"a", [64], 40, 0)], bytes(64)), "unknown tensor type 40"),
    "type 41": (tiny([], [info(b"a", [128], 41, 0)], bytes(64)), "unknown tensor type 41"),
    "type 45": (tiny([], [info(b"a", [4], 45, 0)], bytes(64)), "unknown tensor type 45"),
    "row that q4_K cannot hold": (tiny([], [info(b"a", [128, 2], 12, 0)], bytes(144)), "q4_K"),
    "tile that type 44 cannot hold": (tiny([], [info(b"a", [64, 16], 44, 0)], bytes(1025)), "fp8_32x32"),
    "name twice": (tiny([], [info(b"a", [4], 0, 0), info(b"a", [4], 0, 32)], bytes(48)), "twice"),
    "no name": (tiny([], [info(b"", [4], 0, 0), *GOOD], bytes(48)), "empty name"),
    "offset unaligned": (tiny([], [info(b"a", [4], 0, 16)], bytes(48)), "multiple of 32"),
    "offset past the end": (tiny([], [info(b"a", [4], 0, 64)], bytes(48)), "past the end"),
    "offset huge": (tiny([], [info(b"a", [4], 0, 2**63)], bytes(48)), "past the end"),
    "offset negative": (tiny([], [info(b"a", [4], 0, 2**64 - 32)], bytes(48)), "past the end"),
    "overlap": (tiny([], [info(b"a", [12], 0, 0), info(b"b", [4], 0, 32)], bytes(64)), "overlaps"),
    "same place": (tiny([], [info(b"a", [4], 0, 0), info(b"b", [4], 0, 0)], bytes(32)), "overlaps"),
    "bytes after the end": (tiny([], GOOD, bytes(65)), "follow the last tensor"),
    "empty": (b"", "too few"),
    "magic alone": (b"GGUF", "too few"),
}


def parse(tmp_path: Path, raw: bytes) -> Container:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    return read_container(path)


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(tmp_path: Path, name: str) -> None:
    raw, message = BAD_FILES[name]
    with pytest.raises(FileFormatError, match=message) as e:
        parse(tmp_path, raw)
    assert "x.gguf" in str(e.value)


def test_the_good_one_is_good(tmp_path: Path) -> None:
    assert parse(tmp_path, tiny([key(b"k", 4, U32)], GOOD, bytes(48))).metadata == {"k": 5}
    assert parse(tmp_path, tiny([], GOOD, bytes(64))).tensors["b"].dims == (2, 2)  # padded at the end


def test_every_cut_of_the_tiny_file(tmp_path: Path) -> None:
    raw = tiny([key(b"k", 8, string(b"value")), key(b"general.alignment", 4, struct.pack("<I", 32))], GOOD, bytes(48))
    for n in range(len(raw)):
        with pytest.raises(FileFormatError):
            parse(tmp_path, raw[:n])


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "is a folder, not a regular file"),
        (tmp_path / "absent.gguf", "cannot be read"),
    ):
        with pytest.raises(FileFormatError, match=message):
            read_container(path)


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening it would wait for a writer for ever, so here opening anything is a failure."""
    os.mkfifo(tmp_path / "x.gguf")
    monkeypatch.setattr("builtins.open", forbidden := Mock(side_effect=AssertionError("opened")))
    with pytest.raises(FileFormatError, match=r"x\.gguf: is a pipe, not a regular file"):
        read_container(tmp_path / "x.gguf")
    forbidden.assert_not_called()


@given(st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_headers_are_refused_or_consistent(tmp_path: Path, data: st.DataObject) -> None:
    """Any bytes changed in the header: a FileFormatError, or a container whose tensors lie inside the file."""
    raw = bytearray(tiny([key(b"k", 9, struct.pack("<IQ", 8, 2) + string(b"a") + string(b"bc"))], GOOD, bytes(48)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 49))
        raw[at] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 32, 127, 128, 255]))
    try:
        c = parse(tmp_path, bytes(raw))
    except FileFormatError:
        return
    assert all(c.data_start <= t.offset and t.offset + t.nbytes <= len(raw) for t in c.tensors.values())


def test_decoders_equal_the_package() -> None:
    rng = np.random.default_rng(0)
    for type_id, qtype, dims in (
        (Q8_0, gguf.GGMLQuantizationType.Q8_0, (96, 5)),
        (Q4_K, gguf.GGMLQuantizationType.Q4_K, (512, 5)),
        (BF16, gguf.GGMLQuantizationType.BF16, (7, 5)),
    ):
        raw = np.frombuffer(rng.bytes(tensor_bytes(type_id, dims, "x")), np.uint8).copy()
        with np.errstate(invalid="ignore"):
            want = gguf.quants.dequantize(raw, qtype).reshape(dims[::-1])
            assert np.array_equal(codecs.decode(raw, type_id, dims), want, equal_nan=True)


def test_fp4x32_and_fp8_as_written_in_the_specification() -> None:
    raw = np.zeros((2, 17), np.uint8)
    raw[0, 0], raw[0, 16] = 0x2 | 0xF << 4, 128  # elements 0 and 1: 1.0 and -6.0, times 2
    raw[1, 15], raw[1, 16] = 0x1 << 4, 126  # element 31 of the second block: 0.5 times 1/2
    x = codecs.decode(raw.reshape(-1), FP4X32, (64,))
    assert (x[0], x[1], x[63]) == (2.0, -12.0, 0.25) and np.count_nonzero(x) == 3
    rows, cols = 64, 96
    tiles = np.arange(6, dtype=np.uint8).reshape(2, 3) + 125
    raw = np.concatenate([np.full(rows * cols, 0x38, np.uint8), tiles.reshape(-1)])  # 0x38 is 1.0
    x = codecs.decode(raw, FP8_32X32, (cols, rows))
    assert np.array_equal(x, np.repeat(np.repeat(2.0 ** (tiles.astype(float) - 127), 32, 0), 32, 1))


def test_encoders_keep_finite_weights_finite() -> None:
    x = np.array([[3e38] * 32, [1e-45] * 32, [0.0] * 32, [-3.4e38] * 32], np.float32)
    for type_id in (Q8_0, BF16, F32):
        assert np.all(np.isfinite(codecs.decode(codecs.encode(x, type_id), type_id, (32, 4))))
    assert np.array_equal(codecs.decode(codecs.encode(x, F32), F32, (32, 4)), x)


def test_q8_0_error_is_within_half_a_step() -> None:
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    y = codecs.decode(codecs.encode(x, Q8_0), Q8_0, (64, 8))
    step = np.abs(x.reshape(-1, 32)).max(axis=1) / 127
    # half a step, plus 127 steps of a scale that is off by half an f16 ulp (2^-11)
    bound = step * (0.5 + 127 * 2.0**-11)
    assert np.all(np.abs((x - y).reshape(-1, 32)) <= bound[:, None])


def test_fp8_encoder_is_exact_on_what_fp8_holds() -> None:
    rng = np.random.default_rng(2)
    raw = np.concatenate([rng.integers(0, 127, 64 * 32, dtype=np.uint8), np.array([120, 131], np.uint8)])
    raw[:1], raw[32 * 32] = 0x7E, 0x7E  # the largest value in either tile, so that the scale is the one to find
    x = codecs.decode(raw, FP8_32X32, (32, 64))
    assert np.array_equal(codecs.encode(x, FP8_32X32), raw)
