"""Sidecar files byte by byte, the fingerprint, and the product rule."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.sidecar.files import (
    GAIN_F16,
    GAIN_F32,
    GAIN_FP4,
    bias_path,
    decode_gains,
    encode_bias,
    encode_gains,
    gain_bytes,
    gain_path,
    list_folder,
    read_bias,
    read_gains,
)
from ds4.sidecar.fingerprint import PRIME, SEED, check_base, fnv1a, format_fingerprint, sidecar_fingerprint
from ds4.sidecar.stack import SidecarStack

CONFIG = ModelConfig.load(Path(__file__).resolve().parents[1] / "data" / "oracle-a")
E, D = CONFIG.n_routed_experts, CONFIG.hidden_size


def gains(seed: int) -> np.ndarray:
    return (1 + 0.1 * np.random.default_rng(seed).standard_normal((E, D))).astype(np.float32)


def test_released_size() -> None:
    assert gain_bytes(384, 5120, GAIN_FP4) == 1_044_492


def test_f32_bytes() -> None:
    raw = encode_gains(np.array([[1.5, -2.0]], np.float32), GAIN_F32)
    assert raw == struct.pack("<iiiff", 1, 2, 1, 1.5, -2.0)
    assert np.array_equal(decode_gains(raw, 1, 2, "x"), [[1.5, -2.0]])


def test_f16_bytes() -> None:
    raw = encode_gains(np.array([[1.5, 0.25]], np.float32), GAIN_F16)
    assert raw == struct.pack("<iiiee", 1, 2, 2, 1.5, 0.25)
    assert np.array_equal(decode_gains(raw, 1, 2, "x"), [[1.5, 0.25]])


def test_fp4_bytes() -> None:
    """s - 1 of 0.5, -0.25, then zeros: scale P2(0.5 / 6) = 2^-3, codes 4 and -2, low nibble first."""
    s = np.ones((1, 32), np.float32)
    s[0, :2] = 1.5, 0.75
    raw = encode_gains(s, GAIN_FP4)
    assert raw == struct.pack("<iii", 1, 32, 43) + bytes([0x6 | 0xC << 4]) + bytes(15) + bytes([127 - 3])
    assert np.array_equal(decode_gains(raw, 1, 32, "x"), s)


@pytest.mark.parametrize("kind", [GAIN_F32, GAIN_F16, GAIN_FP4])
def test_every_cut_and_extra_byte_is_refused(kind: int) -> None:
    raw = encode_gains(np.ones((2, 32), np.float32), kind)
    for n in range(len(raw)):
        with pytest.raises(FileFormatError):
            decode_gains(raw[:n], 2, 32, "x")
    with pytest.raises(FileFormatError, match="bytes"):
        decode_gains(raw + b"\0", 2, 32, "x")


@pytest.mark.parametrize(
    ("head", "message"),
    [((2, 32, 7), "type 7"), ((3, 32, 1), "3 experts"), ((2, -32, 1), "-32"), ((-1, 32, 1), "-1")],
)
def test_lying_headers(head: tuple[int, int, int], message: str) -> None:
    raw = struct.pack("<iii", *head) + bytes(256)
    with pytest.raises(FileFormatError, match=message):
        decode_gains(raw, 2, 32, "x")


def test_values_must_be_finite() -> None:
    for kind, patch in ((GAIN_F32, struct.pack("<f", np.inf)), (GAIN_F16, struct.pack("<e", np.nan))):
        raw = bytearray(encode_gains(np.ones((2, 32), np.float32), kind))
        raw[12 : 12 + len(patch)] = patch
        with pytest.raises(FileFormatError, match="finite"):
            decode_gains(bytes(raw), 2, 32, "x")
    raw = bytearray(encode_gains(np.ones((2, 32), np.float32), GAIN_FP4))
    raw[12 + 16] = 255
    with pytest.raises(FileFormatError, match="NaN"):
        decode_gains(bytes(raw), 2, 32, "x")


def test_fp4_needs_whole_blocks() -> None:
    with pytest.raises(ValueError, match="width 40"):
        encode_gains(np.ones((1, 40), np.float32), GAIN_FP4)
    with pytest.raises(FileFormatError, match="multiple of 32"):
        decode_gains(struct.pack("<iii", 1, 40, 43) + bytes(34), 1, 40, "x")


@given(st.binary(max_size=120))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_refused_or_whole(raw: bytes) -> None:
    try:
        s = decode_gains(raw, 1, 32, "x")
    except FileFormatError:
        return
    assert s.shape == (1, 32) and np.all(np.isfinite(s))


def test_bias(tmp_path: Path) -> None:
    path = bias_path(tmp_path, 3)
    assert path.name == "rb_L03.bin"
    path.write_bytes(struct.pack("<iiff", 2, 1, 0.5, -1.0))
    assert np.array_equal(read_bias(path, 2), [0.5, -1.0])
    assert encode_bias(np.array([0.5, -1.0], np.float32)) == path.read_bytes()
    for bad in (struct.pack("<iiff", 3, 1, 0, 0), struct.pack("<iiff", 2, 2, 0, 0), struct.pack("<iif", 2, 1, 0)):
        path.write_bytes(bad)
        with pytest.raises(FileFormatError):
            read_bias(path, 2)


def test_folder_listing(tmp_path: Path) -> None:
    gain_path(tmp_path, 0).write_bytes(encode_gains(gains(0)))
    (tmp_path / "manifest.txt").write_text("for people")
    assert list_folder(tmp_path, 7).gains == {0: gain_path(tmp_path, 0)}
    (tmp_path / "amp_L01.bin").write_bytes(b"")
    with pytest.raises(FileFormatError, match="amp"):
        list_folder(tmp_path, 7)
    (tmp_path / "amp_L01.bin").rename(tmp_path / "gr_L07.bin")
    with pytest.raises(FileFormatError, match="gr_L07"):
        list_folder(tmp_path, 7)
    with pytest.raises(FileFormatError, match="folder"):
        list_folder(tmp_path / "absent", 7)


@pytest.mark.parametrize(
    "name",
    ["gr_L0.bin", "gr_L00.bin.part", "GR_L00.BIN", "rb_L01.txt", "lr_L00.bin", "gr_L001.bin", "weights.safetensors"],
)
def test_a_name_that_might_hold_a_correction_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileFormatError, match=name):
        list_folder(tmp_path, 7)


def test_text_for_people_is_passed_over(tmp_path: Path) -> None:
    for name in ("manifest.json", "manifest.txt", "README.md", "LICENSE", "report.html", ".journal", "base.fnv"):
        (tmp_path / name).write_text("")
    (tmp_path / "plots").mkdir()
    found = list_folder(tmp_path, 7)
    assert found.gains == {} and found.biases == {}
    stack = SidecarStack.open(CONFIG, tmp_path)
    assert ["base.fnv" in w or "no layer files" in w for w in stack.warnings] == [True, True]
    (tmp_path / "gr_L00.bin").mkdir()
    with pytest.raises(FileFormatError, match="gr_L00"):
        SidecarStack.open(CONFIG, tmp_path)


def naive_fnv(data: bytes, h: int = SEED) -> int:
    for b in data:
        h = (h ^ b) * PRIME % 2**64
    return h


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_fnv_equals_the_byte_loop(data: bytes, h: int) -> None:
    assert fnv1a(data, h) == naive_fnv(data, h)


def test_fnv_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).bytes(1000)
    monkeypatch.setattr("ds4.sidecar.fingerprint._CHUNK", 64)
    assert fnv1a(data) == naive_fnv(data)


def write_second(folder: Path) -> None:
    folder.mkdir()
    for layer in (0, 3):
        gain_path(folder, layer).write_bytes(encode_gains(gains(layer), GAIN_F32))
    bias_path(folder, 0).write_bytes(encode_bias(np.arange(E, dtype=np.float32)))


def test_fingerprint(tmp_path: Path) -> None:
    assert format_fingerprint(*sidecar_fingerprint(None, 7)) == "14650fb0739d0383 0\n"
    second = tmp_path / "two"
    write_second(second)
    parts = [gain_path(second, 0), bias_path(second, 0), gain_path(second, 3)]
    h = naive_fnv(b"".join(p.read_bytes() for p in parts))
    assert sidecar_fingerprint(second, 7) == (h, 3)


def test_base_fnv_decides(tmp_path: Path) -> None:
    second, third = tmp_path / "two", tmp_path / "three"
    write_second(second)
    third.mkdir()
    (third / "gr_L01.bin").write_bytes(b"broken")  # must not be read before the fingerprint speaks
    assert "missing" in (check_base(third, second, 7) or "")
    line = format_fingerprint(*sidecar_fingerprint(second, 7))
    for good in (line, line.strip()):
        (third / "base.fnv").write_text(good)
        assert check_base(third, second, 7) is None
    for bad in ("14650fb0739d0383 0", line.upper(), line.replace(" ", "  "), "", line + "x"):
        (third / "base.fnv").write_text(bad)
        with pytest.raises(FileFormatError, match=r"base\.fnv"):
            SidecarStack.open(CONFIG, second, third)


def test_post_training_on_nothing_is_signed_with_the_seed(tmp_path: Path) -> None:
    third = tmp_path / "three"
    third.mkdir()
    gain_path(third, 2).write_bytes(encode_gains(gains(4)))
    (third / "base.fnv").write_text("14650fb0739d0383 0")
    stack = SidecarStack.open(CONFIG, None, third)
    assert stack.warnings == [] and stack.gain(2) is not None
    write_second(tmp_path / "two")
    with pytest.raises(FileFormatError, match="mount that one, or none"):
        SidecarStack.open(CONFIG, tmp_path / "two", third)


def test_product_starts_from_one_second_then_third(tmp_path: Path) -> None:
    second, third = tmp_path / "two", tmp_path / "three"
    write_second(second)
    third.mkdir()
    gain_path(third, 0).write_bytes(encode_gains(gains(8), GAIN_F32))
    gain_path(third, 1).write_bytes(encode_gains(gains(9), GAIN_FP4))
    bias_path(third, 1).write_bytes(b"ignored, whatever it is")
    stack = SidecarStack.open(CONFIG, second, third)
    missing, ignored = stack.warnings
    assert "base.fnv is missing" in missing and "rb files are ignored" in ignored
    both = stack.gain(0)
    assert both is not None and both.dtype == np.float32
    assert np.array_equal(both, np.float32(1) * gains(0) * gains(8))
    assert np.array_equal(stack.gain(1), read_gains(gain_path(third, 1), E, D))
    assert stack.gain(2) is None and stack.bias(1) is None
    assert np.array_equal(stack.bias(0), np.arange(E))


def test_a_broken_file_refuses_the_whole_load(tmp_path: Path) -> None:
    second = tmp_path / "two"
    write_second(second)
    gain_path(second, 6).write_bytes(encode_gains(gains(6))[:-1])
    with pytest.raises(FileFormatError, match="gr_L06"):
        SidecarStack.open(CONFIG, second)
