"""The routed experts of one layer: the `DQVL` container, version 3 written and read, version 2 read.

    w[r, 8j : 8j+8]  ~  g_r * C[idx[r, j]]        C: nc codewords x 8

layout of version 3 (little-endian)
    0            u32 "DQVL" · u32 version · u32 layer · u32 n_expert
    16           u64 slot[n_expert][3]: payload offsets from the blob's start, in the order w1, w3, w2
    16 + 24 n    codebook: nc x 8 E4M3, shared by all experts and matrices
    slot         u32 "DQV3" · u16 dim 8 · u16 nc · u32 rows · u32 cols · u32 flags (1 E4M3, 2 plane) ·
                 u32 main bits 12 · u64 codebook offset
    +32          rows x f16 gains, then the main stream (low 12 bits, each row padded to whole bytes), then
                 under flag 2 the plane of bit 12, then one zero byte and zeros to a multiple of 8

Version 2 (`DQVQ`): 16-byte header, f16 codebook, f16 gains, indices of ceil(log2 nc) bits in one stream.
Refused: unknown versions and flags, slots outside the blob or overlapping, absent matrices, gains that are
not finite, NaN codewords, a plane without nc > 4096 or the reverse.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint.codecs import e4m3_to_f32
from ds4.errors import FileFormatError

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]

LAYER_MAGIC, V3_MAGIC, V2_MAGIC = 0x4C565144, 0x33565144, 0x51565144
DIM = 8  # weights a codeword
MAIN_BITS = 12
MAX_BITS = 13
FLAG_E4M3, FLAG_PLANE = 1, 2
MATRICES = ("w1", "w3", "w2")
_LAYER_HEAD = struct.Struct("<IIII")
_V3_HEAD = struct.Struct("<IHHIIIIQ")
_V2_HEAD = struct.Struct("<IHHII")
assert _LAYER_HEAD.size == 16 and _V3_HEAD.size == 32 and _V2_HEAD.size == 16

Shapes = Sequence[tuple[int, int]]  # (rows, cols) of w1, w3, w2


def main_row_bytes(cols: int) -> int:
    """Bytes of one row's low index bits: ceil(cols/8 * 12 / 8)."""
    return (cols // DIM * MAIN_BITS + 7) // 8


def plane_row_bytes(cols: int) -> int:
    """Bytes of one row of bit 12: ceil(cols/8 / 8)."""
    return (cols // DIM + 7) // 8


def payload_bytes(rows: int, cols: int, nc: int) -> int:
    """Bytes of a version 3 payload with its header, the zero byte and the padding."""
    n = _V3_HEAD.size + rows * (2 + main_row_bytes(cols))
    if nc > 1 << MAIN_BITS:
        n += rows * plane_row_bytes(cols)
    return (n + 1 + 7) // 8 * 8


def codebook_offset(n_expert: int) -> int:
    return 16 + 24 * n_expert


def blob_bytes(shapes: Shapes, n_expert: int, nc: int) -> int:
    """Bytes of a layer's blob."""
    per_expert = sum(payload_bytes(r, c, nc) for r, c in shapes)
    return codebook_offset(n_expert) + nc * DIM + n_expert * per_expert


def payload_slots(shapes: Shapes, n_expert: int, nc: int) -> NDArray[np.uint64]:
    """u64 [n_expert, 3]: where we put the payloads, expert by expert without gaps."""
    sizes = [payload_bytes(r, c, nc) for r, c in shapes]
    first = codebook_offset(n_expert) + nc * DIM
    inside = np.cumsum([0] + sizes[:-1]).astype(np.uint64)
    starts = (first + np.arange(n_expert) * sum(sizes)).astype(np.uint64)
    return starts[:, None] + inside[None, :]


# ---- encode ----


def encode_head(layer: int, shapes: Shapes, n_expert: int, codebook: U8) -> bytes:
    """Layer header, slots and codebook (u8 [nc, 8], E4M3): everything before the first payload."""
    slots = payload_slots(shapes, n_expert, len(codebook))
    head = _LAYER_HEAD.pack(LAYER_MAGIC, 3, layer, n_expert)
    return head + slots.astype("<u8").tobytes() + np.ascontiguousarray(codebook).tobytes()


def encode_payload(gains: F16, indices: NDArray[np.uint16], nc: int, n_expert: int) -> bytes:
    """One matrix: gains f16 [rows], indices u16 [rows, cols/8] below nc."""
    rows, per_row = indices.shape
    cols = per_row * DIM
    flags = FLAG_E4M3 | (FLAG_PLANE if nc > 1 << MAIN_BITS else 0)
    head = _V3_HEAD.pack(V3_MAGIC, DIM, nc, rows, cols, flags, MAIN_BITS, codebook_offset(n_expert))
    parts = [head, np.ascontiguousarray(gains, "<f2").tobytes(), pack_main(indices).tobytes()]
    if flags & FLAG_PLANE:
        parts.append(pack_plane(indices).tobytes())
    return b"".join(parts).ljust(payload_bytes(rows, cols, nc), b"\0")


def pack_main(indices: NDArray[np.uint16]) -> U8:
    """u16 [rows, n] -> u8 [rows, ceil(12 n / 8)]: low 12 bits, little-endian bit order."""
    rows, n = indices.shape
    low = np.zeros((rows, (n + 1) // 2, 2), np.uint16)
    low.reshape(rows, -1)[:, :n] = indices & np.uint16(0xFFF)
    a, b = low[:, :, 0], low[:, :, 1]
    out = np.empty((rows, (n + 1) // 2, 3), np.uint8)
    out[:, :, 0] = a & 0xFF
    out[:, :, 1] = (a >> 8) | ((b & 15) << 4)
    out[:, :, 2] = b >> 4
    return out.reshape(rows, -1)[:, : (12 * n + 7) // 8]


def unpack_main(main: U8, n: int) -> NDArray[np.uint16]:
    """u8 [rows, ceil(12 n / 8)] -> u16 [rows, n]."""
    rows = main.shape[0]
    padded = np.zeros((rows, (n + 1) // 2 * 3), np.uint8)
    padded[:, : main.shape[1]] = main
    triple = padded.reshape(rows, -1, 3).astype(np.uint16)
    out = np.empty((rows, (n + 1) // 2, 2), np.uint16)
    out[:, :, 0] = triple[:, :, 0] | ((triple[:, :, 1] & 15) << 8)
    out[:, :, 1] = (triple[:, :, 1] >> 4) | (triple[:, :, 2] << 4)
    return out.reshape(rows, -1)[:, :n]


def pack_plane(indices: NDArray[np.uint16]) -> U8:
    """Bit 12 of u16 [rows, n] -> u8 [rows, ceil(n / 8)]; bit i of byte k belongs to index 8k + i."""
    return np.packbits((indices >> np.uint16(MAIN_BITS)).astype(np.uint8) & 1, axis=1, bitorder="little")


def unpack_plane(plane: U8, n: int) -> NDArray[np.uint16]:
    """u8 [rows, ceil(n / 8)] -> u16 [rows, n] of 0 or 1."""
    return np.unpackbits(plane, axis=1, count=n, bitorder="little").astype(np.uint16)


# ---- decode ----


@dataclass(frozen=True)
class Payload:
    """One quantized matrix, as views into the file.

    `codebook` is u8 [nc, 8] (E4M3) in version 3 and f16 [nc, 8] in version 2, whose `main` is the one index
    stream of the whole matrix, u8 [n], and whose `plane` is None.
    """

    rows: int
    cols: int
    nc: int
    gains: F16
    main: U8  # [rows, row_bytes]
    plane: U8 | None  # [rows, plane_bytes]
    codebook: U8 | F16

    def indices(self) -> NDArray[np.uint16]:
        """u16 [rows, cols/8], decoded from the streams; not checked against nc."""
        n = self.cols // DIM
        if self.codebook.dtype != np.uint8:
            return _unpack_stream(self.main, self.rows * n, max((self.nc - 1).bit_length(), 1)).reshape(self.rows, n)
        out = unpack_main(self.main, n)
        if self.plane is not None:
            out |= unpack_plane(self.plane, n) << np.uint16(MAIN_BITS)
        return out

    def codewords(self) -> F32:
        """f32 [nc, 8]."""
        if self.codebook.dtype == np.uint8:
            return e4m3_to_f32(self.codebook.view(np.uint8))
        return self.codebook.astype(np.float32)

    def dequant(self) -> F32:
        """f32 [rows, cols] = gain times codeword; an index past the codebook decodes as zeros."""
        size = max(1 << max((self.nc - 1).bit_length(), 1), self.nc)
        if self.codebook.dtype == np.uint8:
            size = 1 << (MAX_BITS if self.plane is not None else MAIN_BITS)
        book = np.zeros((size, DIM), np.float32)
        book[: self.nc] = self.codewords()
        out: F32 = book[self.indices()].reshape(self.rows, self.cols)
        out *= self.gains.astype(np.float32)[:, None]
        return out


def _unpack_stream(stream: U8, count: int, bits: int) -> NDArray[np.uint16]:
    flags = np.unpackbits(stream, count=count * bits, bitorder="little").reshape(count, bits)
    weights = (1 << np.arange(bits)).astype(np.uint32)
    return (flags.astype(np.uint32) @ weights).astype(np.uint16)


ReadAt = Callable[[int, int], bytes]  # (offset, n) -> exactly n bytes of the blob


class ExpertBlob:
    """A parsed blob: headers, gains and codebook were read and checked, the index streams were not.

    Args:
        view: the blob's bytes (a memory map: nothing is read by constructing views).
        read: reads that the checks go through, so that they touch what they name and nothing beside it.
        shapes: what w1, w3 and w2 must be, (rows, cols).

    Raises:
        FileFormatError: anything of the header, slots, payload headers, codebook or gains is off.
    """

    def __init__(self, where: str, view: U8, read: ReadAt, n_expert: int, shapes: Shapes, layer: int) -> None:
        self.where, self.n_expert, self.shapes = where, n_expert, tuple(shapes)
        self._view, self._read, self._size = view, read, len(view)
        magic, self.version, found_layer, found = _LAYER_HEAD.unpack(self._bytes(0, 16, "header"))
        if magic != LAYER_MAGIC:
            raise self._fail(f"magic is 0x{magic:08X}, expected DQVL (0x{LAYER_MAGIC:08X})")
        if self.version not in (2, 3):
            raise self._fail(f"version {self.version} is not known; 2 and 3 are")
        if found != n_expert:
            raise self._fail(f"holds {found} experts, the model has {n_expert}")
        if found_layer != layer:
            raise self._fail(f"says it is layer {found_layer}, its name says {layer}")
        raw = self._bytes(16, 24 * n_expert, "slots")
        self.slots = np.frombuffer(raw, "<u8").reshape(n_expert, 3)
        self.nc = 0
        self._codebook_at = 0
        spans = [(0, 16 + 24 * n_expert, "slots")]
        for e in range(n_expert):
            for m in range(3):
                spans.append(self._check_payload(e, m))
        if self.version == 3:
            spans.append(self._check_codebook())
        self._check_disjoint(spans)

    # -- reading --

    @property
    def codebook(self) -> U8:
        """u8 [nc, 8] E4M3 of version 3.

        Raises:
            FileFormatError: version 2 has a codebook in every payload, see `payload`.
        """
        if self.version != 3:
            raise self._fail("a version 2 blob has no common codebook; quantize again to run it")
        return self._span(self._codebook_at, self.nc * DIM).reshape(self.nc, DIM)

    def payload(self, expert: int, matrix: int) -> Payload:
        """Matrix 0 w1 (gate), 1 w3 (up), 2 w2 (down) of an expert."""
        rows, cols = self.shapes[matrix]
        at = int(self.slots[expert, matrix])
        if self.version == 2:
            (_, _, nc, _, _) = _V2_HEAD.unpack(self._span(at, 16).tobytes())
            book_at = at + 16
            gains_at = book_at + nc * DIM * 2
            main_at = gains_at + rows * 2
            bits = max((nc - 1).bit_length(), 1)
            main = self._span(main_at, (rows * (cols // DIM) * bits + 7) // 8)
            book = self._span(book_at, nc * DIM * 2).view("<f2").reshape(nc, DIM)
            return Payload(rows, cols, nc, self._span(gains_at, rows * 2).view("<f2"), main, None, book)
        main_at = at + 32 + rows * 2
        row_bytes, plane_bytes = main_row_bytes(cols), plane_row_bytes(cols)
        plane = None
        if self.nc > 1 << MAIN_BITS:
            plane = self._span(main_at + rows * row_bytes, rows * plane_bytes).reshape(rows, plane_bytes)
        return Payload(
            rows,
            cols,
            self.nc,
            self._span(at + 32, rows * 2).view("<f2"),
            self._span(main_at, rows * row_bytes).reshape(rows, row_bytes),
            plane,
            self.codebook,
        )

    def dequant(self, expert: int, matrix: int) -> F32:
        """f32 [rows, cols]."""
        return self.payload(expert, matrix).dequant()

    # -- checks --

    def _check_payload(self, e: int, m: int) -> tuple[int, int, str]:
        rows, cols = self.shapes[m]
        what = f"expert {e} {MATRICES[m]}"
        at = int(self.slots[e, m])
        if at == 0:
            raise self._fail(f"{what} is absent")
        if at % 8:
            raise self._fail(f"{what}: slot {at} is not a multiple of 8")
        if self.version == 2:
            return self._check_v2(at, rows, cols, what)
        head = self._bytes(at, 32 + rows * 2, what)
        magic, dim, nc, n_rows, n_cols, flags, bits, book_at = _V3_HEAD.unpack_from(head)
        if magic != V3_MAGIC:
            raise self._fail(f"{what}: magic is 0x{magic:08X}, expected DQV3 (0x{V3_MAGIC:08X})")
        if dim != DIM or (n_rows, n_cols) != (rows, cols):
            raise self._fail(f"{what} is {n_rows} x {n_cols} in groups of {dim}, expected {rows} x {cols} of {DIM}")
        if not 1 <= nc <= 1 << MAX_BITS or bits != MAIN_BITS:
            raise self._fail(f"{what}: {nc} codewords with {bits} main bits; expected 1..8192 with 12")
        want = FLAG_E4M3 | (FLAG_PLANE if nc > 1 << MAIN_BITS else 0)
        if flags != want:
            raise self._fail(f"{what}: flags are 0x{flags:X}; {nc} codewords need 0x{want:X}")
        if self.nc and (nc, book_at) != (self.nc, self._codebook_at):
            raise self._fail(f"{what} has another codebook than the payloads before it")
        self.nc, self._codebook_at = nc, book_at
        self._check_gains(np.frombuffer(head, "<f2", rows, 32), what)
        n = payload_bytes(rows, cols, nc)
        self._bounds(at, n, what)
        return at, at + n, what

    def _check_v2(self, at: int, rows: int, cols: int, what: str) -> tuple[int, int, str]:
        magic, dim, nc, n_rows, n_cols = _V2_HEAD.unpack(self._bytes(at, 16, what))
        if magic != V2_MAGIC:
            raise self._fail(f"{what}: magic is 0x{magic:08X}, expected DQVQ (0x{V2_MAGIC:08X})")
        if dim != DIM or (n_rows, n_cols) != (rows, cols) or nc < 1:
            raise self._fail(
                f"{what} is {n_rows} x {n_cols} in groups of {dim} with {nc} codewords, "
                f"expected {rows} x {cols} of {DIM}"
            )
        book = self._bytes(at + 16, nc * DIM * 2, what + " codebook")
        if not np.all(np.isfinite(np.frombuffer(book, "<f2"))):
            raise self._fail(f"{what}: a codeword is not finite")
        self.nc = max(self.nc, nc)
        gains = self._bytes(at + 16 + len(book), rows * 2, what + " gains")
        self._check_gains(np.frombuffer(gains, "<f2"), what)
        bits = max((nc - 1).bit_length(), 1)
        n = 16 + len(book) + rows * 2 + (rows * (cols // DIM) * bits + 7) // 8
        self._bounds(at, n, what)
        return at, at + n, what

    def _check_gains(self, gains: F16, what: str) -> None:
        bad = np.flatnonzero(~np.isfinite(gains))
        if len(bad):
            raise self._fail(f"{what}: gain of row {bad[0]} is {gains[bad[0]]}")

    def _check_codebook(self) -> tuple[int, int, str]:
        raw = np.frombuffer(self._bytes(self._codebook_at, self.nc * DIM, "codebook"), np.uint8)
        bad = np.flatnonzero((raw & 0x7F) == 0x7F)
        if len(bad):
            raise self._fail(f"codeword {bad[0] // DIM} has a NaN")
        return self._codebook_at, self._codebook_at + len(raw), "codebook"

    def _check_disjoint(self, spans: list[tuple[int, int, str]]) -> None:
        spans.sort()
        for (_, end, a), (start, _, b) in pairwise(spans):
            if start < end:
                raise self._fail(f"{b} overlaps {a}")

    def _bounds(self, at: int, n: int, what: str) -> None:
        if at > self._size or n > self._size - at:
            raise self._fail(f"{what}: {n} bytes at {at} run past the blob's {self._size}")

    def _bytes(self, at: int, n: int, what: str) -> bytes:
        self._bounds(at, n, what)
        return self._read(at, n)

    def _span(self, at: int, n: int) -> U8:
        return self._view[at : at + n]

    def _fail(self, text: str) -> FileFormatError:
        return FileFormatError(f"{self.where}: {text}")
