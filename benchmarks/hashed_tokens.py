"""Corpora in which every token is the hash of its own place, and a ledger that proves none lost or repeated.

Token = corpus number in the top 4 bits, a bijective hash of the position in the other 28. The sum and
the sum of squares (modulo 2**64) of the tokens served in an epoch are then order-independent checksums
of the positions served: what is lost, repeated or altered changes both, but for a chance of 2**-64. The
check costs two passes over a batch, a fifth of what reading it costs, and knows nothing of the loader
but the batch itself and its `sample_ids`.
"""

import numpy as np

POSITION_BITS = 28
MAX_TOKENS = 1 << POSITION_BITS
_POSITIONS, _WORD = MAX_TOKENS - 1, (1 << 64) - 1
_CHUNK = 1 << 22


def token_of(corpus, positions):
    """Return the tokens [n] uint32 at positions [n] of a corpus numbered from 0 to 14."""
    x = np.asarray(positions).astype(np.uint64)
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA6B, 13)):
        x = (x * np.uint64(factor)) & np.uint64(_POSITIONS)
        x ^= x >> np.uint64(shift)
    return (x | np.uint64((corpus + 1) << POSITION_BITS)).astype(np.uint32)


def corpus_tokens(corpus):
    """Return a function (start, stop) -> the tokens of a corpus."""
    return lambda start, stop: token_of(corpus, np.arange(start, stop))


def checksums(corpus, num_tokens):
    """Return the sum and the sum of squares of all tokens of a corpus, from the definition alone."""
    total = squares = 0
    for start in range(0, num_tokens, _CHUNK):
        tokens = token_of(corpus, np.arange(start, min(start + _CHUNK, num_tokens))).astype(np.int64)
        total += int(tokens.sum())
        squares += int(np.vecdot(tokens, tokens))
    return total & _WORD, squares & _WORD


class Ledger:
    """Checksums by (corpus, epoch) of all rows served, compared when an epoch is complete.

    A row's corpus is written in its tokens; its epoch follows from how many rows of that corpus came
    before it. Every row counts as `length` tokens, so corpora must hold a multiple of it.

    Args:
        expected: per corpus its rows in an epoch, sum and sum of squares.
        saved: what `state` returned, to go on from there.
    """

    def __init__(self, expected, saved=None):
        self._expected = expected
        saved = saved or {
            "rows": [0] * len(expected),
            "open": {},
            "complete": 0,
            "wrong": [],
            "steps_wrong": 0,
        }
        self._rows = list(saved["rows"])
        self._open = {key: list(value) for key, value in saved["open"].items()}
        self.complete = saved["complete"]
        self.wrong = list(saved["wrong"])
        self.steps_wrong = saved["steps_wrong"]

    def state(self):
        """Return everything as JSON values."""
        return {
            "rows": self._rows,
            "open": self._open,
            "complete": self.complete,
            "wrong": self.wrong,
            "steps_wrong": self.steps_wrong,
        }

    @property
    def open_rows(self):
        """Rows of epochs under way, which are not proven yet."""
        return sum(rows for rows, _, _ in self._open.values())

    def add(self, parts, *, first_sample):
        """Take in one step: the batches of all ranks, as (sample_ids [n], tokens [n, length] int64)."""
        ids = np.concatenate([ids for ids, _ in parts])
        order = np.argsort(ids)
        if not np.array_equal(ids[order], np.arange(first_sample, first_sample + len(ids))):
            self.steps_wrong += 1
        corpus = np.concatenate([(tokens[:, 0] >> POSITION_BITS) - 1 for _, tokens in parts])[order]
        total = np.concatenate([tokens.sum(axis=1) for _, tokens in parts])[order]
        squares = np.concatenate([np.vecdot(tokens, tokens) for _, tokens in parts])[order]
        for index in np.unique(corpus).tolist():
            chosen = np.flatnonzero(corpus == index)
            epochs = (self._rows[index] + np.arange(len(chosen))) // self._expected[index][0]
            self._rows[index] += len(chosen)
            for epoch in np.unique(epochs).tolist():
                rows = chosen[epochs == epoch]
                self._book(index, epoch, len(rows), int(total[rows].sum()), int(squares[rows].sum()))

    def _book(self, corpus, epoch, rows, total, squares):
        entry = self._open.setdefault(f"{corpus}:{epoch}", [0, 0, 0])
        entry[0] += rows
        entry[1] = (entry[1] + total) & _WORD
        entry[2] = (entry[2] + squares) & _WORD
        if entry[0] == self._expected[corpus][0]:
            del self._open[f"{corpus}:{epoch}"]
            self.complete += 1
            if entry != list(self._expected[corpus]):
                self.wrong.append(f"corpus {corpus} epoch {epoch}")
