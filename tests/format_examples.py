"""Small corpora of every format, to run one test over all of them; see tests/data/make_binary.py."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
DOCUMENTS: list[list[int]] = json.loads((DATA / "documents.json").read_text())
LARGE = 1000


@dataclass(frozen=True)
class Example:
    """One corpus that a tool wrote."""

    format: str
    folder: str
    """Below tests/data."""
    options: str = ""
    """As in a spec, with the comma before."""
    dtype: str = "uint16"
    """What its tokens are served as."""
    scale: int = 1
    """What the ids of the documents are multiplied with."""
    begins: bool = False
    """The end token is stored before each document."""

    @property
    def documents(self) -> list[list[int]]:
        """The documents it holds."""
        scaled = [[token * self.scale for token in document] for document in DOCUMENTS]
        return [[document[-1], *document[:-1]] for document in scaled] if self.begins else scaled

    def copy(self, folder: Path) -> str:
        """Copy its files below a folder, and return its spec there."""
        target = folder / "example"
        shutil.copytree(DATA / self.folder, target)
        return f"{self.format}:{target}{self.options}"


EXAMPLES = [
    *(Example("megatron", f"megatron/{dtype}") for dtype in ("uint8", "int8", "uint16", "int16")),
    Example("megatron", "megatron/int32", dtype="uint32", scale=LARGE),
    Example("megatron", "megatron/int64", dtype="uint32"),
    Example("megatron", "megatron/sentences"),
    Example("datatrove", "datatrove/uint16"),
    Example("datatrove", "datatrove/uint32", dtype="uint32", scale=LARGE),
    Example("datatrove", "datatrove/index", dtype="uint32", scale=LARGE),
    Example("olmo", "olmo/uint16", ",dtype=uint16,eos_id=0"),
    Example("olmo", "olmo/uint32", ",dtype=uint32,eos_id=0", dtype="uint32", scale=LARGE),
    Example("olmo", "olmo/metadata", ",dtype=uint32", dtype="uint32", scale=LARGE),
    Example("olmo", "olmo/header", ",eos_id=0"),
    Example("nanogpt", "nanogpt/raw", ",eos_id=0"),
    Example("nanogpt", "nanogpt/header", ",bos_id=0", begins=True),
    # those below: tools/make_test_corpora_columnar.py
    Example("mds", "mds/ndarray", dtype="uint32"),
    Example("mds", "mds/ndarray-uint16"),
    Example("mds", "mds/ndarray-2d", dtype="uint32"),
    Example("mds", "mds/bytes", ",dtype=uint16"),
    Example("mds", "mds/columns", dtype="uint32"),
    Example("mds", "mds/zstd", dtype="uint32"),
    Example("mds", "mds/splits"),
    Example("hf", "hf/int32", dtype="uint32"),
    Example("hf", "hf/int64", dtype="uint32"),
    Example("hf", "hf/uint16"),
    Example("hf", "hf/large-list", dtype="uint32"),
    Example("hf", "hf/splits", dtype="uint32"),
    Example("parquet", "parquet/int32", dtype="uint32"),
    Example("parquet", "parquet/uint16"),
    Example("parquet", "parquet/no-statistics", dtype="uint32"),
    Example("parquet", "parquet/datasets", dtype="uint32"),
    Example("fms", "fms/uint32", dtype="uint32"),
    Example("fms", "fms/uint16"),
    Example("fms", "fms/int64", dtype="uint32"),
    Example("fms", "fms/stream", dtype="uint32"),
]
