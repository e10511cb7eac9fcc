"""Filter during training: exclude documents from the loss by a predicate.

Their tokens stay, so that counts, positions and all other samples are unchanged; their labels become -100. If
the filter will never change, filtering when the data is prepared is cheaper.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.errors import ConfigError
from penstock.data.transform import Sample
from penstock.data.types import IGNORED_LABEL


@dataclass(frozen=True, slots=True)
class DropDocuments:
    """Set the labels of a row's documents to -100 where `reject(tokens)` is true.

    `reject` gets the tokens [n] int64 of the document's part in the row; a document that spans several rows
    is judged part by part.
    """

    reject: Callable[[Int64], bool]
    """Predicate; define it at module level if worker processes are used."""

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
