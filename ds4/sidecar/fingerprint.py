"""`base.fnv`: which sidecar ② a post-training directory ③ was solved on.

`<16 hex digits> <file count>`: FNV-1a 64 over the bytes of ②'s gr_Lnn.bin then rb_Lnn.bin, layer by layer,
missing ones skipped. The seed is the published engine's, one digit short of the standard basis.

    h <- (h xor byte) * prime      mod 2^64

A byte loop would take seconds for forty megabytes. Bit k of h xor byte changes bit k of the product by
itself and otherwise through the bits below it, so each of the low eight bits is a running xor; with the low
bytes known, h xor byte is h plus a known number, and h a polynomial in the prime.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.errors import FileFormatError
from ds4.sidecar.files import FINGERPRINT, list_folder, read_bytes

SEED = 1469598103934665603
PRIME = 1099511628211
_MASK = (1 << 64) - 1
_CHUNK = 1 << 20


def fnv1a(data: bytes, h: int = SEED) -> int:
    """FNV-1a 64 of bytes, continued from h."""
    view = np.frombuffer(data, np.uint8)
    for i in range(0, len(view), _CHUNK):
        h = _fnv_chunk(view[i : i + _CHUNK], h)
    return h


def _fnv_chunk(b: NDArray[np.uint8], h: int) -> int:
    n = len(b)
    # low[i]: the low byte of h before byte i, bit by bit
    low = np.zeros(n, np.uint8)
    factor = np.uint8(PRIME & 0xFF)
    for bit in range(8):
        mixed = (low ^ b) & np.uint8((1 << bit) - 1)  # bits below, known already
        flip = ((mixed * factor) >> np.uint8(bit) & np.uint8(1)) ^ (b >> np.uint8(bit) & np.uint8(1))
        running = np.bitwise_xor.accumulate(flip)
        start = np.uint8(h >> bit & 1)
        low[0] |= start << np.uint8(bit)
        low[1:] |= (running[:-1] ^ start) << np.uint8(bit)
    step = (low ^ b).astype(np.int64) - low
    powers = np.full(n, PRIME, np.uint64)
    np.multiply.accumulate(powers, out=powers)  # prime^1 .. prime^n, wrapping
    added = int(np.sum(step.view(np.uint64) * powers[::-1], dtype=np.uint64))
    return (h * int(powers[-1]) + added) & _MASK


def sidecar_fingerprint(folder: str | Path | None, n_layers: int) -> tuple[int, int]:
    """(hash, file count) of ②; without ② the seed and 0."""
    h, count = SEED, 0
    if folder is None:
        return h, count
    found = list_folder(folder, n_layers)
    for layer in range(n_layers):
        for files in (found.gains, found.biases):
            if layer in files:
                h = fnv1a(read_bytes(files[layer]), h)
                count += 1
    return h, count


def format_fingerprint(h: int, count: int) -> str:
    return f"{h:016x} {count}\n"


def solved_on(posttrain: str | Path) -> tuple[int, int] | None:
    """(hash, file count) of ③'s `base.fnv`; None where it has none.

    Raises:
        FileFormatError: it says nothing that can be read.
    """
    path = Path(posttrain) / FINGERPRINT
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as e:
        raise FileFormatError(f"{path}: cannot be read ({e})") from e
    match = re.fullmatch(r"([0-9a-f]{16}) ([0-9]{1,9})\n?", text)
    if match is None:
        raise FileFormatError(f"{path}: is {text[:60]!r}; expected 16 lower-case hex digits, a space and a count")
    return int(match[1], 16), int(match[2])


def check_base(posttrain: str | Path, sidecar: str | Path | None, n_layers: int) -> str | None:
    """Whether ③ belongs to ②; to be called before any layer file of ③ is read.

    Returns:
        A warning if ③ has no `base.fnv`, else None.

    Raises:
        FileFormatError: it says another ②, or says nothing that can be read.
    """
    path = Path(posttrain) / FINGERPRINT
    want = solved_on(posttrain)
    if want is None:
        return f"{path} is missing: nothing says which sidecar this post-training was solved on"
    have = sidecar_fingerprint(sidecar, n_layers)
    if want != have:
        raise FileFormatError(
            f"{path}: solved on sidecar {format_fingerprint(*want).strip()!r}, mounted is "
            f"{format_fingerprint(*have).strip()!r} ({sidecar or 'none'}); mount that one, or none"
        )
    return None
