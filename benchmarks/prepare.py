"""How fast is text made into tokens, beside the tokenizer alone?

The same JSON lines are given to `penstock data prepare` (read, parse, encode, write, checksum), and their
texts to the library's `encode_batch` and `encode_batch_fast`, in lists of 2 MiB as a loop of one's own would.
All take turns in one process. The texts are Python's own sources cut into documents of lognormal length.

    python benchmarks/prepare.py --out benchmarks/results
"""

import argparse
import json
import shutil
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from measuring import interleaved, median
from results_file import file_result

from penstock.data.prepare import PrepareConfig, prepare
from penstock.text.tokenizer import train_tokenizer

BATCH_CHARS = 2 * 2**20


def main():
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--mib", type=float, default=8, help="MiB of text (default 8)")
    parser.add_argument("--characters", type=float, default=3000, help="mean, of a document (default 3000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), arguments)
    rates = {name: {key: median(values) / 1e6 for key, values in row.items()} for name, row in found.items()}
    best = max(row["per_cpu_s"] for name, row in rates.items() if name != "penstock data prepare")
    for name, row in rates.items():
        rate, wall = row["per_cpu_s"], row["per_s"]
        print(f"{name:24}{rate:8.3f} M tokens/CPU-s {wall:8.3f} M tokens/s, {rate / best:.2f} of best peer")
    if arguments.out:
        settings = {"mib": arguments.mib, "characters": arguments.characters, "rounds": arguments.rounds}
        file_result(
            arguments.out,
            "prepare",
            {"settings": settings, "million_tokens": rates, "rounds": found},
            packages=("tokenizers", "pyarrow"),
        )


def measure(scratch, arguments):
    """Return name -> rates of rounds; see `interleaved`."""
    texts = documents(int(arguments.mib * 2**20), mean=arguments.characters)
    source, file = scratch / "texts.jsonl", scratch / "tokenizer.json"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_tokenizer(texts, vocab_size=32_000)
    tokenizer.save(file)
    library = tokenizer._plain
    batches = list(in_batches(texts))

    def ours():
        shutil.rmtree(scratch / "corpus", ignore_errors=True)
        summary = prepare([str(source)], scratch / "corpus", config=PrepareConfig(tokenizer=file))
        return summary.manifest.num_tokens - summary.manifest.num_documents  # without the end tokens

    def raw(encode):
        return lambda: sum(len(one) for batch in batches for one in encode(batch, add_special_tokens=False))

    settings = {
        "penstock data prepare": ours,
        "encode_batch": raw(library.encode_batch),
        "encode_batch_fast": raw(library.encode_batch_fast),
    }
    return interleaved(settings, rounds=arguments.rounds)


def documents(size, *, mean):
    """Return texts of lognormal length, of so many characters in all."""
    random = np.random.default_rng(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("*/*.py")
    )
    whole = ""
    for path in files:
        whole += path.read_text(errors="replace")
        if len(whole) >= size:
            break
    texts, at = [], 0
    while at < min(size, len(whole)):
        length = max(int(random.lognormal(np.log(mean) - 0.5, 1.0)), 1)
        texts.append(whole[at : at + length])
        at += length
    return texts


def in_batches(texts):
    """Yield lists of texts of some 2 MiB."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


if __name__ == "__main__":
    main()
