"""Tokens with which the learned turns of conversations end: a model that learned them stops at them.

A base model's own end token is often another, `<|endoftext|>` beside `<|im_end|>` say. The run's
`generation_config.json` names both, so that whatever opens the run, or what is exported of it, stops.
"""

from collections.abc import Collection

import numpy as np

from penstock.data.corpus.columns import LEARNED
from penstock.data.corpus.corpus import Corpus

_TOKENS = 2**18  # that are looked at
_MIN_SHARE = 0.01  # of the turns: conversations that were cut end anywhere


def turn_ends(corpus: Corpus, control: Collection[int]) -> set[int]:
    """Return the tokens that end learned turns at the beginning of a corpus of conversations.

    Args:
        control: token ids that structure a conversation; no other ends a turn.
    """
    stop = min(int(corpus.starts[1]), _TOKENS)
    learned = corpus.columns[LEARNED].values(0, 0, stop)
    lasts = np.flatnonzero(learned[:-1] & ~learned[1:])
    ids, counts = np.unique(corpus.tokens(0, stop)[lasts], return_counts=True)
    often = ids[counts >= _MIN_SHARE * len(lasts)].tolist()
    return {token for token in often if token in control}
