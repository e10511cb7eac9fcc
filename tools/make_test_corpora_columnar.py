"""Write the small corpora of tests/data that MosaicML streaming, Hugging Face datasets and pyarrow make.

Needs their packages, which Penstock's tests do not. Every corpus holds the documents of documents.json;
those named `empties` an empty one after every third, which MDS cannot store as arrays.

    pip install torch==2.13.0 mosaicml-streaming==0.13.0 datasets==5.0.1
    python tools/make_test_corpora_columnar.py tests/data
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, Features, LargeList, Sequence, Value
from streaming import MDSWriter  # type: ignore[import-not-found]

Documents = list[list[int]]


def with_empties(docs: Documents) -> Documents:
    """Return the documents with an empty one after every third."""
    return [doc for n, given in enumerate(docs) for doc in ((given,) if n % 3 else (given, []))]


def fixed(docs: Documents) -> Documents:
    """Return the first 8 tokens of the documents that have them."""
    return [doc[:8] for doc in docs if len(doc) >= 8]


def write_mds(folder: Path, docs: Documents) -> None:
    """Write MDS shards in each encoding; arrays cannot be empty there."""
    for name, kind, dtype, given in (
        ("ndarray", "ndarray", "int32", docs),
        ("ndarray-uint16", "ndarray:uint16", "uint16", docs),
        ("ndarray-fixed", "ndarray:int32:8", "int32", fixed(docs)),
        ("ndarray-2d", "ndarray:int64", "int64", docs),
        ("bytes", "bytes", "uint16", docs),
        ("empties", "bytes", "int64", with_empties(docs)),
    ):
        shape = (1, -1) if name == "ndarray-2d" else (-1,)
        arrays = [np.array(doc, dtype).reshape(shape) for doc in given]
        values = [array.tobytes() if kind == "bytes" else array for array in arrays]
        _mds(folder / name, {"tokens": kind}, [{"tokens": value} for value in values])
    samples: list[dict[str, Any]] = [  # Any: a value of each encoding
        {"id": n, "name": f"document {n}", "tokens": np.array(doc, "uint32"), "z": {"n": n}}
        for n, doc in enumerate(docs)
    ]
    columns = {"tokens": "ndarray:uint32", "id": "int", "name": "str", "z": "json"}
    _mds(folder / "columns", columns, samples, hashes=["sha1", "xxh64"])
    _mds(folder / "zstd", columns, samples, hashes=["sha1", "xxh64"], compression="zstd:7")
    _mds(folder / "pkl", {"tokens": "pkl"}, [{"tokens": [1, 2]}])
    for split in ("train", "val"):
        part = docs if split == "train" else docs[:2]
        _mds(
            folder / "splits" / split,
            {"tokens": "ndarray:uint16"},
            [{"tokens": np.array(d, "uint16")} for d in part],
        )


def _mds(out: Path, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any) -> None:
    with MDSWriter(out=str(out), columns=columns, size_limit=2500, **options) as writer:
        for sample in samples:
            writer.write(sample)


def write_hf(folder: Path, docs: Documents) -> None:
    """Write Hugging Face datasets with save_to_disk."""
    for name, kind in (
        ("int32", Sequence(Value("int32"))),
        ("int64", Sequence(Value("int64"))),
        ("uint16", Sequence(Value("uint16"))),
        ("large-list", LargeList(Value("uint32"))),
    ):
        texts = [f"document {n}" for n in range(len(docs))]
        features = Features({"text": Value("string"), "input_ids": kind})
        made = Dataset.from_dict({"text": texts, "input_ids": docs}, features=features)
        made.save_to_disk(folder / name, num_shards=3)
    rows = Features({"input_ids": Sequence(Value("int32"), length=8)})
    Dataset.from_dict({"input_ids": fixed(docs)}, features=rows).save_to_disk(folder / "fixed")
    lists = Features({"input_ids": Sequence(Value("int32")), "attention_mask": Sequence(Value("int8"))})
    for name, none in (("empties", []), ("nulls", None)):
        given = [doc or none for doc in with_empties(docs)]
        masks = [[1] * len(doc or ()) for doc in given]
        made = Dataset.from_dict({"input_ids": given, "attention_mask": masks}, features=lists)
        made.save_to_disk(folder / name)
    one = Features({"input_ids": Sequence(Value("int32"))})
    part = {"train": docs, "validation": docs[:4]}
    splits = {name: Dataset.from_dict({"input_ids": d}, features=one) for name, d in part.items()}
    DatasetDict(splits).save_to_disk(folder / "splits", num_shards={"train": 2, "validation": 1})


def write_parquet(folder: Path, docs: Documents) -> None:
    """Write Parquet with pyarrow and with Hugging Face datasets."""
    folder.mkdir(parents=True)
    for name, kind, options in (
        ("int32", pa.list_(pa.int32()), {"compression": "zstd"}),
        ("uint16", pa.large_list(pa.uint16()), {"compression": "snappy"}),
        ("no-statistics", pa.list_(pa.int64()), {"write_statistics": False, "compression": "gzip"}),
        ("empties", pa.list_(pa.int32()), {"compression": "none"}),
        ("nulls", pa.list_(pa.int32()), {"use_dictionary": False, "data_page_version": "2.0"}),
    ):
        given: list[list[int] | None] = list(with_empties(docs) if name in ("empties", "nulls") else docs)
        if name == "nulls":
            given = [doc or None for doc in given]
        table = pa.table({"id": list(range(len(given))), "tokens": pa.array(given, kind)})
        (folder / name).mkdir()
        for part in range(2):
            rows = table.slice(part * 24, 24 if not part else None)
            pq.write_table(
                rows, folder / name / f"train-0000{part}-of-00002.parquet", row_group_size=9, **options
            )
    features = Features({"input_ids": Sequence(Value("int32"))})
    (folder / "datasets").mkdir()
    made = Dataset.from_dict({"input_ids": docs}, features=features)
    made.to_parquet(folder / "datasets" / "tokens.parquet", batch_size=10)


def write_fms(folder: Path, docs: Documents) -> None:
    """Write a record batch a document, as fms-fsdp reads them (dataset_utils.py, ArrowHandler)."""
    for name, dtype, new in (
        ("uint32", "uint32", pa.ipc.new_file),
        ("uint16", "uint16", pa.ipc.new_file),
        ("int64", "int64", pa.ipc.new_file),
        ("empties", "uint32", pa.ipc.new_file),
        ("stream", "int32", pa.ipc.new_stream),
    ):
        for part in range(2):
            path = folder / name / f"part{part}.arrow"
            path.parent.mkdir(parents=True, exist_ok=True)
            schema = pa.schema([pa.field("tokens", pa.type_for_alias(dtype))])
            given = with_empties(docs) if name == "empties" else docs
            half = len(given) // 2
            with pa.OSFile(str(path), "wb") as sink, new(sink, schema) as writer:
                for doc in given[half:] if part else given[:half]:
                    writer.write(pa.record_batch([pa.array(doc, schema.field(0).type)], schema))


def main() -> None:
    """Write all of them below a folder."""
    root = Path(sys.argv[1])
    docs = json.loads((root / "documents.json").read_text())
    for write in (write_mds, write_hf, write_parquet, write_fms):
        folder = root / write.__name__.removeprefix("write_")
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, docs)


if __name__ == "__main__":
    main()
