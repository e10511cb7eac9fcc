"""Data loading: tokens on disk to batches; every training sample is a pure function of (corpora, seed, k).

Public names: `open_corpus(path)` and `Loader(...)`. Torch is imported only when a loader delivers tensors.
"""

from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.open import open_corpus
from penstock.data.loader import Loader

__all__ = ["Corpus", "Loader", "open_corpus"]
