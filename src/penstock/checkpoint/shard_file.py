"""Shard file of one rank: safetensors, with a checksum per MiB in its header; no torch.

    8 bytes        length of the header
    header         JSON: each part's dtype, sizes and position; the checksums of the blocks below
    data           the parts, without gaps, largest element type first, so that all are aligned

Any safetensors reader can read it; a part of a tensor is named `NAME@OFFSETS`. The checksums are CRC-32 of
blocks, not of parts, so that a reader of a few rows verifies only the blocks it reads. They detect errors of
disks and networks, not deliberate changes.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.boxes import Box, label, parse_label

BLOCK_BYTES = 2**20
_SUMS = "crc32_per_mib"
_EXPONENTS = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),  # no infinity, and one nan of each sign
    "F8_E5M2": (np.uint8, 0x7C),
}
"""Bits of each dtype that are all set in a number that is not finite."""
_AT_ONCE = 2**16  # bytes examined together, within a processor's cache


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Box of a tensor stored in a file."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    dtype: str
    """Name of the dtype in safetensors."""
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Position of a part's data, from a file's header."""

    box: Box
    dtype: str
    start: int
    """Offset within the data, the header not counted."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Parsed header of a file."""

    parts: dict[str, list[Stored]]
    """Stored parts by tensor name."""
    sums: list[int]
    """CRC-32 of each block of the data."""
    data_start: int
    """Offset of the data in the file."""


def in_order(parts: Sequence[TensorPart]) -> list[TensorPart]:
    """Return the parts in storage order."""
    return sorted(parts, key=lambda part: (-part.item_bytes, part.name, part.box.offsets))


def not_finite(parts: Sequence[TensorPart], data: memoryview) -> list[str]:
    """Return the tensors with a part that contains an infinity or a NaN.

    >>> part = TensorPart("w", (2,), Box((0,), (2,)), "F32", 4)
    >>> not_finite([part], memoryview(np.array([1, np.inf], np.float32).tobytes()))
    ['w']
    """
    found, start = [], 0
    for part in parts:
        end = start + part.box.num_elements * part.item_bytes
        if part.dtype in _EXPONENTS:
            kind, bits = _EXPONENTS[part.dtype]
            numbers, step = np.frombuffer(data[start:end], kind), _AT_ONCE // part.item_bytes
            if any(
                bool(np.any(numbers[first : first + step] & kind(bits) == bits))
                for first in range(0, len(numbers), step)
            ):
                found.append(part.name)
        start = end
    return list(dict.fromkeys(found))


def header_of(parts: Sequence[TensorPart], data: memoryview) -> bytes:
    """Return the header of the file with these parts, in their order."""
    sums = "".join(f"{crc:08x}" for crc in block_sums(data))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", _SUMS: sums}}
    start = 0
    for part in parts:
        end = start + part.box.num_elements * part.item_bytes
        entries[label(part.name, part.box, part.shape)] = {
            "dtype": part.dtype,
            "shape": part.box.sizes,
            "data_offsets": (start, end),
        }
        start = end
    assert start == len(data), (start, len(data))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    return len(text).to_bytes(8, "little") + text


def block_sums(data: memoryview) -> list[int]:
    """Return the CRC-32 of each block of bytes; the last block may be short."""
    return [zlib.crc32(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]


def parse_header(content: memoryview) -> Header:
    """Parse the header of a file after its checksum was verified."""
    raw = bytes(content)
    entries = json.loads(raw[8:])
    sums = entries.pop("__metadata__")[_SUMS]
    parts: dict[str, list[Stored]] = {}
    for text, entry in entries.items():
        name, box = parse_label(text, entry["shape"])
        start, end = entry["data_offsets"]
        parts.setdefault(name, []).append(Stored(box, entry["dtype"], start, end - start))
    return Header(parts, [int(sums[i : i + 8], 16) for i in range(0, len(sums), 8)], len(raw))
