"""Make the small corpora of other tools' binary formats, with those tools where they install.

    pip install torch==2.13.0 megatron-core==0.16.1 datatrove[io]==0.10.1 ai2-olmo-core==3.0.0
    python tests/data/make_binary.py

Every corpus holds the documents of documents.json, in order, half of them in each of two files. nanoGPT
and modded-nanogpt are scripts, not packages: their few lines that write a file are repeated here.
"""

import json
import random
import shutil
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
EOS = 0
LARGE = 1000  # what ids are multiplied with where they must not fit 16 bits


def make_documents() -> list[list[int]]:
    """Return documents of ids below 128, which every integer type holds; some are the end token alone."""
    rng = random.Random(3)
    lengths = [rng.choice([0, 1, 2, 5, 9, 17, 40, 90]) for _ in range(36)]
    return [[*(rng.randrange(1, 128) for _ in range(length)), EOS] for length in lengths]


def halves(documents: list[list[int]]) -> list[list[list[int]]]:
    """Return the documents of both files."""
    return [documents[:20], documents[20:]]


def make_megatron(folder: Path, documents: list[list[int]], dtype: type, *, sentences: bool = False) -> None:
    """Write with Megatron-LM's own builder; with sentences, a document has several sequences."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(parents=True)
    for number, part in enumerate(halves(documents)):
        builder = IndexedDatasetBuilder(str(folder / f"part-{number}.bin"), dtype=dtype)
        for document in part:
            tokens = torch.tensor(document, dtype=torch.int64)
            cuts = list(range(0, len(document), 7)) if sentences else [0]
            lengths = np.diff([*cuts, len(document)]).tolist()
            builder.add_document(tokens, lengths)
        builder.finalize(str(folder / f"part-{number}.idx"))


def make_datatrove(folder: Path, documents: list[list[int]], *, token_size: int, metadata: bool) -> None:
    """Write with datatrove's own file class."""
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    for number, part in enumerate(halves(documents)):
        file = TokenizedFile(
            str(folder),
            f"{number:05d}_shuffled.ds",
            tokenizer_name_or_path="someone/tokenizer" if metadata else None,
            save_final_metadata=metadata,
            token_size=token_size,
        )
        for document in part:
            file.write(document, None)
        file.close()


def make_olmo(folder: Path, documents: list[list[int]], dtype: type, *, metadata: bool, header: bool) -> None:
    """Write flat files, and their metadata with OLMo-core."""
    folder.mkdir(parents=True)
    for number, part in enumerate(halves(documents)):
        tokens = np.array([token for document in part for token in document], dtype)
        path = folder / f"part-{number}-00000.npy"
        if header:
            np.save(path, tokens)
        else:
            tokens.tofile(path)
        if metadata:
            from olmo_core.data.utils import write_document_indices

            write_document_indices(path, dtype=dtype, eos_token_id=EOS)


def make_nanogpt(folder: Path, documents: list[list[int]], *, header: bool) -> None:
    """Write as nanoGPT's prepare.py does; with a header, as llm.c does, which stores the token before."""
    folder.mkdir(parents=True)
    for number, part in enumerate(halves(documents)):
        if header:
            part = [[EOS, *document[:-1]] for document in part]
        tokens = np.array([token for document in part for token in document], np.uint16)
        head = np.zeros(256, np.int32)
        head[:3] = 20240520, 1, len(tokens)
        with (folder / f"train_{number:06d}.bin").open("wb") as file:
            file.write((head.tobytes() if header else b"") + tokens.tobytes())


def main() -> None:
    """Write every corpus anew."""
    documents = make_documents()
    large = [[token * LARGE for token in document] for document in documents]
    (HERE / "documents.json").write_text(json.dumps(documents) + "\n")
    for name in ("megatron", "datatrove", "olmo", "nanogpt"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    for dtype in (np.uint8, np.int8, np.int16, np.uint16, np.int64):
        make_megatron(HERE / "megatron" / dtype.__name__, documents, dtype)
    make_megatron(HERE / "megatron" / "int32", large, np.int32)
    make_megatron(HERE / "megatron" / "sentences", documents, np.uint16, sentences=True)
    make_datatrove(HERE / "datatrove" / "uint16", documents, token_size=2, metadata=True)
    make_datatrove(HERE / "datatrove" / "uint32", large, token_size=4, metadata=True)
    make_datatrove(HERE / "datatrove" / "index", large, token_size=4, metadata=False)
    make_olmo(HERE / "olmo" / "uint16", documents, np.uint16, metadata=False, header=False)
    make_olmo(HERE / "olmo" / "uint32", large, np.uint32, metadata=False, header=False)
    make_olmo(HERE / "olmo" / "metadata", large, np.uint32, metadata=True, header=False)
    make_olmo(HERE / "olmo" / "header", documents, np.uint16, metadata=False, header=True)
    make_nanogpt(HERE / "nanogpt" / "raw", documents, header=False)
    make_nanogpt(HERE / "nanogpt" / "header", documents, header=True)


if __name__ == "__main__":
    main()
