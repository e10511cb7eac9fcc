"""Fill in the middle: rearrange documents so that a model learns to write between two texts.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (arXiv:2207.14255): a document
is cut at two random positions into prefix, middle and suffix, and becomes

    PSM:  <pre> prefix <suf> suffix <mid> middle
    SPM:  <pre> <suf> suffix <mid> prefix middle        (their SPMv2, which shares work with PSM)

It is applied to tokens, within each document of a row ("context level" in the paper, their best variant). The
three sentinels make a document three tokens longer, and a row keeps its length: the last three tokens of the
document, before its end token if it has one, are dropped from the row.
"""

from dataclasses import dataclass, replace

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.data.transform import Sample
from penstock.data.types import IGNORED_LABEL

_SENTINELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInTheMiddle:
    """Rearrange a share of the documents of every row.

    Labels of a rearranged document are the next token of its new order, sentinels included; its last token
    has no label. Documents without any label (padding, or dropped by another transform) and those of three
    tokens or fewer are unchanged.
    """

    prefix_id: int
    """Token id of <pre>."""
    middle_id: int
    """Token id of <mid>."""
    suffix_id: int
    """Token id of <suf>."""
    eos_id: int | None = None
    """Token that ends documents; it stays last in its document. None: the corpus has no such token."""
    rate: float = 0.5
    """Share of documents that are rearranged; in the paper, up to 0.9 does not hurt the left-to-right
    loss."""
    spm_rate: float = 0.5
    """Share of those in SPM order; the paper trains on both."""

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"FillInTheMiddle.{name} must be in [0, 1]", got=getattr(self, name))
        ids = (self.prefix_id, self.middle_id, self.suffix_id)
        if min(ids) < 0 or len({*ids, self.eos_id}) < len(ids) + 1:
            raise ConfigError(
                "FillInTheMiddle needs distinct token ids, none negative", got=(*ids, self.eos_id)
            )

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with some of its documents rearranged."""
        chosen = rng.random(len(sample.document_ends)) < self.rate
        input_ids, labels = sample.input_ids.copy(), sample.labels.copy()
        for span, take in zip(sample.documents(), chosen.tolist(), strict=True):
            if not take or (labels[span] == IGNORED_LABEL).all():
                continue
            made = self._rearranged(sample.input_ids[span], rng)
            if made is not None:
                input_ids[span] = made
                labels[span] = np.append(made[1:], IGNORED_LABEL)
        return replace(sample, input_ids=input_ids, labels=labels)

    def _rearranged(self, document: Int64, rng: np.random.Generator) -> Int64 | None:
        """Return a document [n] in its new order [n]; None if it is too short."""
        ended = self.eos_id is not None and document[-1] == self.eos_id
        body, end = (document[:-1], document[-1:]) if ended else (document, document[:0])
        if len(body) <= _SENTINELS:
            return None
        body = body[:-_SENTINELS]
        first, second = sorted(rng.integers(0, len(body) + 1, size=2).tolist())
        prefix, middle, suffix = body[:first], body[first:second], body[second:]
        pre, mid, suf = [self.prefix_id], [self.middle_id], [self.suffix_id]
        if rng.random() < self.spm_rate:
            return np.concatenate((pre, suf, suffix, mid, prefix, middle, end))
        return np.concatenate((pre, prefix, suf, suffix, mid, middle, end))
