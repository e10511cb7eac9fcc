"""Tokens on disk to batches: every training sample is a pure function of (corpora, seed, k).

Public names: `open_corpus(path)` and `Loader(...)`. Torch is imported only when a loader delivers
tensors.
"""

from penstock.data.corpus import Corpus
from penstock.data.loader import Loader
from penstock.data.opening import open_corpus

__all__ = ["Corpus", "Loader", "open_corpus"]
