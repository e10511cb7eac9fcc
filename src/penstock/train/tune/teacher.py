"""A teacher's most likely tokens: columns beside a corpus, made by one pass of the teacher over it."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.env import Ranks
from penstock.core.errors import UsageError
from penstock.data.corpus.columns import TEACHER_IDS, TEACHER_LOG_PROBS
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.manifest import ColumnEntry
from penstock.data.corpus_rows import CorpusRows
from penstock.data.types import IGNORED_LABEL
from penstock.models.decoder.model import Decoder
from penstock.nn.head import OutputHead
from penstock.nn.loss_chunks import chunk_tokens
from penstock.parallel.mesh import World
from penstock.train.tune.corpus_pass import BLOCK_TOKENS, Partial, Pass, blocks_from, score_block


def top_k_scores(
    k: int, temperature: float, *, known: int
) -> Callable[[Tensor, OutputHead, Tensor], tuple[Tensor, Tensor]]:
    """Return a function to the ids and log-probabilities of the k most likely tokens, [tokens, k] each.

    A token that is not learned has zeros.

    Args:
        known: number of token ids, at most that of the output matrix; rows after them are padding.
    """

    def scores(hidden: Tensor, head: OutputHead, labels: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(labels), k, dtype=torch.int32, device=hidden.device)
        log_probs = torch.zeros(len(labels), k, dtype=torch.float32, device=hidden.device)
        learned = (labels != IGNORED_LABEL).nonzero()[:, 0]
        at_once = chunk_tokens(len(head.weight), on_cpu=learned.device.type == "cpu")
        for chunk in torch.split(learned, at_once):
            found = (head(hidden[chunk]).float() / temperature).log_softmax(1)[:, :known].topk(k, 1)
            ids[chunk], log_probs[chunk] = found.indices.int(), found.values
        return ids, log_probs

    return scores


def teach(
    corpus: Corpus,
    model: Decoder,
    out: Path,
    *,
    identity: str,
    k: int,
    temperature: float,
    length: int,
    rows: int,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> None:
    """Write the columns of a corpus into a new folder; a pass that was interrupted goes on.

    Args:
        identity: of the teacher's weights.
        k: tokens kept of each distribution.
        length: tokens per row; longer documents are cut.
        rows: rows per forward pass.
        progress: called with the blocks done and their number.

    Raises:
        UsageError: the folder exists, or `k` is larger than the vocabulary.
    """
    # Models of one family may share a tokenizer and differ in padding: Qwen 2.5 has 151,936 or 152,064 rows.
    known = min(model.config.vocab_size, corpus.manifest.vocab_size)
    if not 1 <= k <= known:
        raise UsageError(f"--top-k must be from 1 to the vocabulary of {known:,}", got=k)
    model.limit_texts(length)
    if out.exists():
        raise UsageError(f"{out} exists", fix="Name a folder that does not, with --out.")
    entries = [
        ColumnEntry(name=TEACHER_IDS, dtype="int32", width=k),
        ColumnEntry(name=TEACHER_LOG_PROBS, dtype="float32", width=k),
    ]
    made_with = {
        "teacher": identity,
        "vocab_size": known,
        "top_k": k,
        "temperature": temperature,
        "row_length": length,
    }
    partial = Partial(out, corpus, entries, made_with, keeps=True)
    run = Pass(
        model=model.eval(),
        world=World(Ranks(rank=0, world_size=1, local_rank=0), device),
        mesh=None,
        rows=rows,
    )
    of = CorpusRows(corpus, length=length, cuts=True, block_tokens=BLOCK_TOKENS)
    for block, tables in blocks_from(of, partial.blocks):
        values = score_block(run, of, tables, top_k_scores(k, temperature, known=known), entries)
        partial.put(of, tables, values, blocks=block + 1)
        progress(block + 1, of.num_blocks)
    partial.publish()
