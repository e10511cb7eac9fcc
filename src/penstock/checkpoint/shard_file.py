"""The file of one rank: safetensors, with a checksum of every MiB of it in its header; no torch.

    8 bytes        length of the header
    header         JSON: each part's type, sizes and place; the checksums of the blocks below
    data           the parts, without gaps, largest element type first, so that all are aligned

Any tool that reads safetensors reads it; a part of a tensor is called `NAME@OFFSETS`. The checksums are
CRC-32 of blocks, not of parts, so that a reader of a few rows checks the megabytes it reads and no more. They
find what disks and networks spoil, not what someone altered on purpose.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.checkpoint.boxes import label, parse_label
from penstock.core.boxes import Box

BLOCK_BYTES = 2**20
_SUMS = "crc32_per_mib"


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor in a file."""

    name: str
    """Of the tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    dtype: str
    """As safetensors spells it."""
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the data of a part begins, as a file's header says."""

    box: Box
    dtype: str
    start: int
    """Byte of the data, the header not counted."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds."""

    parts: dict[str, list[Stored]]
    """By tensor."""
    sums: list[int]
    """CRC-32 of each block of the data."""
    data_start: int
    """Byte of the file where the data begins."""


def in_order(parts: Sequence[Part]) -> list[Part]:
    """Return the parts in the order in which they are stored."""
    return sorted(parts, key=lambda part: (-part.item_bytes, part.name, part.box.offsets))


def header_of(parts: Sequence[Part], data: memoryview) -> bytes:
    """Return the beginning of the file that holds these parts, in their order."""
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
    text += b" " * (-len(text) % 8)  # the data begins aligned
    return len(text).to_bytes(8, "little") + text


def block_sums(data: memoryview) -> list[int]:
    """Return the CRC-32 of each block of bytes, the last one may be short."""
    return [zlib.crc32(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]


def parse_header(content: memoryview) -> Header:
    """Read the beginning of a file.

    Raises:
        ValueError: it is damaged.
    """
    raw = bytes(content)
    try:
        entries = json.loads(raw[8:])
        sums = entries.pop("__metadata__")[_SUMS]
        parts: dict[str, list[Stored]] = {}
        for text, entry in entries.items():
            name, box = parse_label(text, entry["shape"])
            start, end = entry["data_offsets"]
            parts.setdefault(name, []).append(Stored(box, entry["dtype"], start, end - start))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header lacks {error}") from None
    return Header(parts, [int(sums[i : i + 8], 16) for i in range(0, len(sums), 8)], len(raw))
