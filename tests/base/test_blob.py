"""blob.py byte by byte: sizes of the specification, streams at odd shapes, both versions, every refusal."""

import struct

import numpy as np
import pytest

from ds4.base.blob import (
    DIM,
    ExpertBlob,
    blob_bytes,
    codebook_offset,
    encode_head,
    encode_payload,
    pack_main,
    pack_plane,
    payload_bytes,
    payload_slots,
    unpack_main,
    unpack_plane,
)
from ds4.checkpoint.codecs import f32_to_e4m3
from ds4.errors import FileFormatError

TOY = ((5, 72), (5, 72), (9, 40))  # w1, w3, w2: odd index counts a row, no two axes equal
E = 3


def random_layer(nc: int, seed: int = 0) -> tuple[np.ndarray, list[list[tuple[np.ndarray, np.ndarray]]]]:
    rng = np.random.default_rng(seed)
    book = f32_to_e4m3(rng.standard_normal((nc, DIM)).astype(np.float32))
    layer = []
    for _ in range(E):
        row = []
        for rows, cols in TOY:
            idx = rng.integers(0, nc, (rows, cols // DIM), dtype=np.uint16)
            idx[0, -1] = nc - 1
            row.append((rng.random(rows).astype(np.float16), idx))
        layer.append(row)
    return book, layer


def encode(nc: int, seed: int = 0, number: int = 7) -> bytes:
    book, layer = random_layer(nc, seed)
    parts = [encode_head(number, TOY, E, book)]
    parts += [encode_payload(gains, idx, nc, E) for row in layer for gains, idx in row]
    return b"".join(parts)


def parse(raw: bytes, n_expert: int = E, number: int = 7) -> ExpertBlob:
    view = np.frombuffer(raw, np.uint8)
    return ExpertBlob("x.gguf: tensor b", view, lambda at, n: raw[at : at + n], n_expert, TOY, number)


def test_sizes_of_the_specification() -> None:
    released = ((2304, 5120), (2304, 5120), (5120, 2304))
    assert blob_bytes(released, 384, 4096) == 2_555_598_864
    assert blob_bytes(released, 384, 8192) == 2_767_968_272
    assert blob_bytes(released, 128, 4096) == 851_888_144
    assert blob_bytes(TOY, 3, 4096) == 33_960
    assert blob_bytes(TOY, 3, 8192) == 66_800
    assert (len(encode(4096)), len(encode(8192))) == (33_960, 66_800)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9, 640])
def test_streams_bit_by_bit(n: int) -> None:
    """The rule as written: bit b of index j is bit 12j + b of the row; plane bit i of byte k is index 8k + i."""
    idx = np.random.default_rng(n).integers(0, 8192, (3, n), dtype=np.uint16)
    main, plane = pack_main(idx), pack_plane(idx)
    assert main.shape == (3, -(-12 * n // 8)) and plane.shape == (3, -(-n // 8))
    for r in range(3):
        row = int.from_bytes(main[r].tobytes(), "little")
        high = int.from_bytes(plane[r].tobytes(), "little")
        for j in range(n):
            assert (row >> 12 * j & 0xFFF) | (high >> j & 1) << 12 == idx[r, j]
        assert row >> 12 * n == 0 and high >> n == 0
        two = main[r].tobytes() + b"\0"
        assert all(
            int.from_bytes(two[12 * j // 8 : 12 * j // 8 + 2], "little") >> 12 * j % 8 & 0xFFF == idx[r, j] & 0xFFF
            for j in range(n)
        )
    assert np.array_equal(unpack_main(main, n) | unpack_plane(plane, n) << 12, idx)


@pytest.mark.parametrize("nc", [16, 256, 4096, 5000, 8192])
def test_round_trip(nc: int) -> None:
    book, layer = random_layer(nc)
    blob = parse(encode(nc))
    assert blob.nc == nc and blob.version == 3
    assert np.array_equal(blob.codebook, book)
    for e in range(E):
        for m, (rows, cols) in enumerate(TOY):
            p = blob.payload(e, m)
            assert (p.rows, p.cols) == (rows, cols)
            assert (p.plane is not None) == (nc > 4096)
            assert np.array_equal(p.indices(), layer[e][m][1]) and np.array_equal(p.gains, layer[e][m][0])
            words = p.codewords()[layer[e][m][1]].reshape(rows, cols)
            assert np.array_equal(blob.dequant(e, m), words * layer[e][m][0].astype(np.float32)[:, None])


def test_header_field_by_field() -> None:
    raw = encode(8192)
    assert struct.unpack_from("<IIII", raw) == (0x4C565144, 3, 7, 3) and raw[:4] == b"DQVL"
    slots = np.frombuffer(raw, "<u8", 9, 16).reshape(3, 3)
    assert slots[0, 0] == 16 + 72 + 65536 and slots[0, 1] - slots[0, 0] == 128 and slots[1, 0] - slots[0, 2] == 136
    head = struct.unpack_from("<IHHIIIIQ", raw, int(slots[1, 2]))
    assert head == (0x33565144, 8, 8192, 9, 40, 3, 12, 88)
    assert struct.unpack_from("<IHHIIIIQ", encode(4096), 16 + 72 + 32768)[5] == 1


def test_padding_of_every_payload_has_a_zero_byte() -> None:
    for rows, cols in ((1, 8), (4, 64), (5, 72), (9, 40), (32, 64)):
        for nc in (4096, 8192):
            idx = np.full((rows, cols // DIM), nc - 1, np.uint16)
            raw = encode_payload(np.full(rows, 1, np.float16), idx, nc, 1)
            streams = 32 + rows * (2 + -(-cols * 12 // 64)) + (rows * -(-cols // 64) if nc == 8192 else 0)
            assert len(raw) == payload_bytes(rows, cols, nc) and len(raw) % 8 == 0
            assert 1 <= len(raw) - streams <= 8 and not any(raw[streams:])


def v2_blob(nc: int) -> tuple[bytes, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """A version 2 blob: 16-byte payload header, f16 codebook, f16 gains, one stream of ceil(log2 nc) bits."""
    rng = np.random.default_rng(4)
    bits = (nc - 1).bit_length()
    payloads, parts, slots, at = [], [], [], 16 + 24 * E
    for _ in range(E):
        for rows, cols in TOY:
            book = rng.standard_normal((nc, DIM)).astype(np.float16)
            gains = rng.random(rows).astype(np.float16)
            idx = rng.integers(0, nc, rows * cols // DIM)
            stream = sum(int(v) << bits * j for j, v in enumerate(idx))
            body = stream.to_bytes(-(-len(idx) * bits // 8), "little")
            raw = struct.pack("<IHHII", 0x51565144, 8, nc, rows, cols) + book.tobytes() + gains.tobytes() + body
            raw = raw.ljust((len(raw) + 8 + 7) // 8 * 8, b"\0")
            payloads.append((book, gains, idx))
            slots.append(at)
            parts.append(raw)
            at += len(raw)
    head = struct.pack("<IIII", 0x4C565144, 2, 7, E) + np.array(slots, "<u8").tobytes()
    return head + b"".join(parts), payloads


@pytest.mark.parametrize("nc", [16, 100, 4096])
def test_version_2_is_read(nc: int) -> None:
    raw, payloads = v2_blob(nc)
    blob = parse(raw)
    assert blob.version == 2
    for i, (book, gains, idx) in enumerate(payloads):
        e, m = divmod(i, 3)
        rows, cols = TOY[m]
        assert np.array_equal(blob.payload(e, m).indices().reshape(-1), idx)
        want = book.astype(np.float32)[idx].reshape(rows, cols) * gains.astype(np.float32)[:, None]
        assert np.array_equal(blob.dequant(e, m), want)
    with pytest.raises(FileFormatError, match="version 2"):
        _ = blob.codebook


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(16, 0x7C00, "codeword is not finite"), (16 + 100 * 16, 0x7E00, "gain of row 0"), (0, 0x5157, "magic")],
)
def test_version_2_is_checked_too(at: int, value: int, message: str) -> None:
    raw = bytearray(v2_blob(100)[0])
    struct.pack_into("<H", raw, 16 + 24 * E + at, value)
    with pytest.raises(FileFormatError, match=message):
        parse(bytes(raw))


def patched(at: int, layout: str, *values: object, nc: int = 4096) -> bytes:
    raw = bytearray(encode(nc))
    struct.pack_into("<" + layout, raw, at, *values)
    return bytes(raw)


FIRST = codebook_offset(E) + 4096 * DIM  # the first payload
SECOND = int(payload_slots(TOY, E, 4096)[0, 1])
REFUSALS = {
    "blob magic": (0, "I", 0x4C565145, "magic"),
    "version 1": (4, "I", 1, "version 1"),
    "version 4": (4, "I", 4, "version 4"),
    "another layer": (8, "I", 6, "layer 6"),
    "expert count": (12, "I", 2, "2 experts"),
    "expert count huge": (12, "I", 0xFFFFFFFF, "experts"),
    "absent": (16, "Q", 0, "expert 0 w1 is absent"),
    "slot past the end": (16, "Q", 33960, "past"),
    "slot huge": (16, "Q", 2**63 + 8, "past"),
    "slot odd": (16, "Q", FIRST + 4, "multiple of 8"),
    "slot in the slots": (16, "Q", 24, "magic"),
    "slots equal": (24, "Q", FIRST, "overlaps"),
    "payload magic": (FIRST, "I", 0x33565145, "magic"),
    "dim": (FIRST + 4, "H", 16, "groups of 16"),
    "no codewords": (FIRST + 6, "H", 0, "0 codewords"),
    "too many codewords": (FIRST + 6, "H", 8193, "8193"),
    "other codebook size": (SECOND + 6, "H", 4095, "another codebook"),
    "rows": (FIRST + 8, "I", 6, "6 x 72"),
    "rows negative": (FIRST + 8, "I", 2**32 - 5, "x 72"),
    "cols": (FIRST + 12, "I", 64, "5 x 64"),
    "plane without 8192": (FIRST + 16, "I", 3, "flags"),
    "not E4M3": (FIRST + 16, "I", 0, "flags"),
    "unknown flag": (FIRST + 16, "I", 5, "flags are 0x5"),
    "main bits": (FIRST + 20, "I", 11, "11 main bits"),
    "codebook elsewhere": (SECOND + 24, "Q", 96, "another codebook"),
    "gain inf": (FIRST + 32, "H", 0x7C00, "gain of row 0 is inf"),
    "gain nan": (SECOND + 34, "H", 0x7E00, "gain of row 1 is nan"),
    "codeword nan": (88 + 8 * 5, "B", 0xFF, "codeword 5 has a NaN"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    at, layout, value, message = REFUSALS[name]
    with pytest.raises(FileFormatError, match=message):
        parse(patched(at, layout, value))


def test_flag_2_belongs_to_more_than_4096() -> None:
    first = codebook_offset(E) + 8192 * DIM
    with pytest.raises(FileFormatError, match="flags"):
        parse(patched(first + 16, "I", 1, nc=8192))


@pytest.mark.parametrize("at", [0, 96, 2**63])
def test_a_codebook_offset_that_all_payloads_agree_on_may_still_lie(at: int) -> None:
    raw = bytearray(encode(4096))
    for slot in payload_slots(TOY, E, 4096).reshape(-1):
        struct.pack_into("<Q", raw, int(slot) + 24, at)
    with pytest.raises(FileFormatError, match=r"overlaps|past"):
        parse(bytes(raw))


def test_every_cut_is_refused() -> None:
    raw = encode(16)
    for n in range(len(raw)):
        with pytest.raises(FileFormatError):
            parse(raw[:n])


def test_checks_do_not_read_the_streams() -> None:
    raw = encode(8192)
    seen = np.zeros(len(raw), bool)

    def read(at: int, n: int) -> bytes:
        seen[at : at + n] = True
        return raw[at : at + n]

    ExpertBlob("x", np.frombuffer(raw, np.uint8), read, E, TOY, 7)
    gains = sum(rows * 2 for rows, _ in TOY)
    assert seen.sum() == 16 + 24 * E + 8192 * DIM + E * (3 * 32 + gains)


def test_slots_may_come_in_any_order() -> None:
    """A reader follows the slots: payloads swapped in the file decode the same."""
    raw = bytearray(encode(4096))
    slots = payload_slots(TOY, E, 4096)
    a, b, n = int(slots[0, 0]), int(slots[1, 0]), payload_bytes(*TOY[0], 4096)
    want = parse(bytes(raw)).dequant(0, 0)
    raw[a : a + n], raw[b : b + n] = raw[b : b + n], raw[a : a + n]
    struct.pack_into("<Q", raw, 16, b)
    struct.pack_into("<Q", raw, 16 + 24, a)
    assert np.array_equal(parse(bytes(raw)).dequant(0, 0), want)
