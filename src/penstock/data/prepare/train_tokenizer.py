"""Tokenizer of a corpus: the given one, or one trained on a bounded sample of the inputs.

The sample is the same at every run. If all inputs fit the budget, all are used. Otherwise the inputs are
concatenated and the budget is taken as equal portions at equal distances; each file contributes, from its
beginning, the portions that fall into it. So a large file contributes by its size, and of many small files
every n-th is used whole.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from penstock.core.files import TOKENIZER_FILE
from penstock.core.units import mib
from penstock.data.prepare.documents import Document, ReadOptions, read_records
from penstock.data.prepare.plan import InputFile, OnProgress, PreparationPlan, Progress
from penstock.text.tokenizer import Tokenizer, train_tokenizer

SAMPLE_BYTES = 64 * 2**20
"""Sample size in bytes; it trains in about 15 s on two cores, and more text hardly changes the merges."""


def portions(sizes: Sequence[int], *, budget: int) -> list[int]:
    """Return the number of bytes that each file contributes to the sample.

    >>> portions([10, 20], budget=100)
    [10, 20]
    >>> portions([50] * 512, budget=12_800)[:4]
    [0, 50, 0, 50]
    >>> portions([100_000, 300_000], budget=25_600)
    [6400, 19200]
    """
    total = sum(sizes)
    if total <= budget:
        return list(sizes)
    # Median file size, so that small files are used whole; large ones share 256 portions.
    portion = max(min(total // len(sizes), budget // 256), 1)
    wanted = budget // portion
    given, before = [], 0
    for size in sizes:
        after = before + size
        given.append(((after * wanted) // total - (before * wanted) // total) * portion)
        before = after
    return given


def sample_texts(files: Sequence[InputFile], options: ReadOptions) -> Iterator[str]:
    """Yield the texts of the sample; records without a document are ignored here and listed later."""
    for file, wanted in zip(files, portions([f.bytes for f in files], budget=SAMPLE_BYTES), strict=True):
        taken = 0
        if not wanted:
            continue
        for record in read_records(file, options):
            if isinstance(record.content, Document):
                yield record.content.text[: wanted - taken]
                taken += record.content.num_bytes
            if taken >= wanted:
                break


def settle_tokenizer(
    out: Path,
    plan: PreparationPlan,
    *,
    options: ReadOptions,
    given: Tokenizer | None,
    on_progress: OnProgress,
) -> Tokenizer:
    """Return the corpus's tokenizer after storing it in the folder; it is trained only once.

    Raises:
        InputError: an input changed since the plan was made.
    """
    path = out / TOKENIZER_FILE
    if given is not None:
        if not path.is_file() or path.read_bytes() != given.content:
            given.save(path)
        return given
    if path.is_file():
        return Tokenizer.load(path)
    size = min(plan.input_bytes, SAMPLE_BYTES)
    tokenizer = _train(plan, options, size=size, on_progress=on_progress)
    tokenizer.save(path)
    return tokenizer


_LOOK_EVERY_S = 0.2


def _train(plan: PreparationPlan, options: ReadOptions, *, size: int, on_progress: OnProgress) -> Tokenizer:
    """Train in a thread: the library does not return to Python for seconds, and Ctrl-C must work.

    Args:
        size: bytes of the sample.
    """
    read_bytes = 0
    reading = "read text for the tokenizer"
    on_progress(Progress(stage=reading, total_bytes=size))

    def texts() -> Iterator[str]:
        nonlocal read_bytes
        for text in sample_texts(plan.files, options):
            yield text
            read_bytes += len(text.encode(errors="surrogatepass"))
        read_bytes = size

    pool = ThreadPoolExecutor(1, thread_name_prefix="train-tokenizer")
    try:
        future = pool.submit(train_tokenizer, texts(), vocab_size=int(plan.options["train-tokenizer"]))
        while wait([future], timeout=_LOOK_EVERY_S).not_done:
            if read_bytes < size:
                on_progress(Progress(stage=reading, done_bytes=read_bytes, total_bytes=size))
            else:
                on_progress(Progress(stage=f"train the tokenizer on {mib(size)}"))
        return future.result()
    finally:
        pool.shutdown(wait=False)
