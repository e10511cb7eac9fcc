"""Tokens that adapters add to the vocabulary: their rows of the embedding and of the output matrix.

An adapter that was tuned with new tokens (nn/new_rows.py) gives them the ids after the base's last, so two
adapters may mean different tokens by one id. All their rows are in one table behind the embedding:

    row    0 ... vocabulary - 1    the first adapter's tokens    the second's ...

A step's token ids are replaced by rows. Its logits get columns after the vocabulary, as many as an adapter of
the step has new tokens, which are -inf for all requests but those of that adapter: a request is answered as
it would be alone. Every rank has the whole table; the first rank computes the columns.
"""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from penstock.engine.model_runner.batch import StepBatch
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.softcap import capped


class NewTokens:
    """New tokens of the present adapters.

    Args:
        base: config of the whole base.
    """

    def __init__(self, base: DecoderConfig) -> None:
        self.table: Float[Tensor, "added hidden"] | None = None
        """Rows of the embedding of all new tokens, by ascending adapter index; another tensor after every
        change. None: there are none."""
        self._vocab_size, self._base = base.vocab_size, base
        self._of_embedding: dict[int, Float[Tensor, "new hidden"]] = {}  # by adapter index
        self._of_output: dict[int, Float[Tensor, "new hidden"]] = {}

    def add(
        self, index: int, of_embedding: Float[Tensor, "new hidden"], of_output: Float[Tensor, "new hidden"]
    ) -> None:
        """Add the rows of an adapter's new tokens, in the model's dtype and on its device."""
        self.table = torch.cat([*self._of_embedding.values(), of_embedding])
        self._of_embedding[index], self._of_output[index] = of_embedding, of_output

    def remove(self, index: int) -> None:
        """Remove an adapter's rows; adapters without any are ignored."""
        if self._of_embedding.pop(index, None) is not None:
            del self._of_output[index]
            self.table = torch.cat([*self._of_embedding.values()]) if self._of_embedding else None

    def placed(self, batch: StepBatch) -> StepBatch:
        """Return a step whose token ids are rows of the embedding and of the table behind it."""
        is_new = batch.token_ids >= self._vocab_size
        if self.table is None or not is_new.any():
            return batch
        adapters, rows = _adapter_of_each_token(batch), batch.token_ids.copy()
        first = 0
        for index, found in self._of_embedding.items():
            rows[is_new & (adapters == index)] += first
            first += len(found)
        return replace(batch, token_ids=rows)

    def with_columns(
        self, logits: Float[Tensor, "r vocab"], hidden: Float[Tensor, "t hidden"], batch: StepBatch
    ) -> Float[Tensor, "r wide"]:
        """Return logits with columns for the new tokens of the step's adapters; the same without any.

        Args:
            logits: of `batch.logit_rows`; of no token ids on a rank that does not have them.
            hidden: normalised hidden states, defined for those rows at least.
        """
        if self.table is None or not logits.shape[1]:
            return logits
        adapters = _adapter_of_each_token(batch)[batch.logit_rows]
        present = {index: rows for index, rows in self._of_output.items() if index in adapters}
        if not present:
            return logits
        wide = functional.pad(logits, (0, max(map(len, present.values()))), value=-torch.inf)
        for index, rows in present.items():
            mine = np.flatnonzero(adapters == index)
            at, tokens = (torch.from_numpy(i).to(wide.device) for i in (mine, batch.logit_rows[mine]))
            found = functional.linear(hidden[tokens], rows) / self._base.logits_scaling
            found = capped(found, self._base.final_logit_softcapping)
            wide[at, self._vocab_size : self._vocab_size + len(rows)] = found.to(wide.dtype)
        return wide

    def wrap(self, model: Decoder) -> None:
        """Let the model's embedding look up rows of the table, in place."""
        if self.table is not None and not isinstance(model.embed, ExtendedEmbedding):
            model.embed = ExtendedEmbedding(model.embed, self, first=self._vocab_size)  # type: ignore[assignment]

    @staticmethod
    def unwrap(model: Decoder) -> None:
        """Undo `wrap`."""
        if isinstance(model.embed, ExtendedEmbedding):
            model.embed = model.embed.embedding  # type: ignore[assignment]


class ExtendedEmbedding(nn.Module):
    """Embedding with the rows of new tokens behind its own.

    Args:
        embedding: of the base, whole or summed over ranks.
        first: first row that is the table's.
    """

    def __init__(self, embedding: nn.Module, new_tokens: NewTokens, *, first: int) -> None:
        super().__init__()
        self.embedding = embedding
        self._new_tokens = new_tokens
        self._first = first

    @property
    def weight(self) -> Tensor:
        """Rows of the base, which a tied output matrix shares."""
        weight: Tensor = self.embedding.weight  # type: ignore[assignment]  # not a module
        return weight

    def forward(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... hidden"]:
        """Look up rows."""
        table = self._new_tokens.table
        if table is None:
            return self.embedding(ids)  # type: ignore[no-any-return]
        is_new = ids >= self._first
        old: Tensor = self.embedding(ids.where(~is_new, 0))
        new = functional.embedding((ids - self._first).where(is_new, 0), table)
        return torch.where(is_new[..., None], new, old)


def _adapter_of_each_token(batch: StepBatch) -> np.ndarray:
    return np.repeat(batch.adapters, np.diff(batch.query_starts))
