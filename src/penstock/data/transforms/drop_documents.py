"""A filter while training: documents that a predicate rejects are not trained on.

Their tokens stay, so that counts, positions and every other sample stay what they were; their labels
become -100. A filter that will never change is cheaper when data is prepared.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.errors import ConfigError
from penstock.data.transform import Sample
from penstock.data.types import IGNORED_LABEL, Int64


@dataclass(frozen=True, slots=True)
class DropDocuments:
    """Blank the labels of the documents of a row for which `reject(tokens)` is true.

    `reject` gets the tokens [n] int64 of the part of the document that lies in the row; a long document
    that spans rows is judged part by part.
    """

    reject: Callable[[Int64], bool]
    """A function at the top of a module, where worker processes are used."""

    def __post_init__(self) -> None:
        if not callable(self.reject):
            raise ConfigError(
                "DropDocuments.reject must be a function of a document's tokens", got=self.reject
            )

    def __call__(self, sample: Sample, _rng: np.random.Generator) -> Sample:
        """Return the sample with the labels of its rejected documents at -100."""
        rejected = [span for span in sample.documents() if self.reject(sample.input_ids[span])]
        if not rejected:
            return sample
        labels = sample.labels.copy()
        for span in rejected:
            labels[span] = IGNORED_LABEL
        return replace(sample, labels=labels)
