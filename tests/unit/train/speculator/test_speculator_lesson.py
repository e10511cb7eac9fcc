"""What heads learn from: the right tokens ahead, and none of another document."""

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.data.types import IGNORED_LABEL
from penstock.models.speculator import Speculator, SpeculatorConfig
from penstock.train.speculator.batches import Lesson, hits, losses
from penstock.train.speculator.config import SpeculatorTraining
from penstock.train.speculator.measure import measure


def lesson(documents, *, first=0):
    """One row of documents whose labels are the next token; the last ends with the row."""
    ids = [token for document in documents for token in document]
    labels = [token for document in documents for token in [*document[1:], IGNORED_LABEL]]
    numbers = [number for number, document in enumerate(documents) for _ in document]
    return Lesson(
        hidden=torch.nn.functional.one_hot(torch.tensor([ids]), 10).float(),
        labels=torch.tensor([labels]),
        documents=torch.tensor([numbers]),
        first=first,
    )


def pairs(rows, heads=2):
    """For each head: token given -> token wanted, where it counts."""
    return [
        [
            (g, w)
            for g, w, c in zip(given[0].tolist(), wanted[0].tolist(), counts[0].tolist(), strict=True)
            if c
        ]
        for given, wanted, counts in rows.per_head(heads)
    ]


def test_head_i_is_given_the_token_i_further_and_guesses_the_one_behind():
    assert pairs(lesson([[1, 2, 3, 4, 5, 6]])) == [
        [(2, 3), (3, 4), (4, 5), (5, 6)],
        [(3, 4), (4, 5), (5, 6)],  # the first position starts one further, the last has none behind
    ]


def test_no_head_looks_over_the_end_of_a_document():
    assert pairs(lesson([[1, 2, 3], [4, 5, 6, 7]])) == [[(2, 3), (5, 6), (6, 7)], [(6, 7)]]


def test_positions_before_the_first_are_context_only():
    assert pairs(lesson([[1, 2, 3, 4, 5, 6]], first=2))[0] == [(4, 5), (5, 6)]


class Fixed(Speculator):
    """Each head guesses the token it is given, plus one; but the second is wrong behind 5."""

    def __init__(self):
        super().__init__(SpeculatorConfig(vocab_size=10, emb_dim=10, inner_dim=10, n_predict=2))

    def states(self, _hidden, tokens):
        yield torch.nn.functional.one_hot((tokens[0] + 1) % 10, 10).float()
        wrong = (tokens[1] + 1 + (tokens[1] == 5).int()) % 10
        yield torch.nn.functional.one_hot(wrong, 10).float()

    def guesses(self, _hidden, token, **_):
        second = (token + 2 + (token + 1 == 5).int()) % 10
        return torch.stack([(token + 1) % 10, second], 1)

    def output(self, _head):
        return torch.nn.Identity()


def test_a_hit_counts_where_the_heads_before_were_right():
    right = lesson([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert hits(Fixed(), right) == [(6, 6), (4, 5)]
    jumps = lesson([[1, 2, 3, 9, 0, 1, 2, 3]])  # at 3, 9 the first head is wrong
    assert hits(Fixed(), jumps) == [(5, 6), (3, 4)]


def test_steps_of_decoding_jump_over_the_drafts_that_stood():
    # the first step knows 4 and drafts 5 and 7: one stands; the next knows 6 and drafts 7 and 8 ...
    counted = measure(Fixed(), text=[], own=[lesson([[3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4]])])
    assert counted.steps == 4
    assert counted.decoding == (1.0, 0.75)
    assert counted.tokens_per_step == pytest.approx(1 + 7 / 4)


def test_losses_are_means_over_what_counts():
    speculator = Speculator(SpeculatorConfig(vocab_size=10, emb_dim=10, inner_dim=6, n_predict=2))
    speculator.initialise(seed=1)
    rows = lesson([[1, 2, 3], [4, 5, 6, 7]])
    found = losses(speculator, rows)
    for index, (state, (_, wanted, counts)) in enumerate(
        zip(
            speculator.states(
                rows.hidden[:, :5], torch.stack([g.clamp(min=0) for g, _, _ in rows.per_head(2)])
            ),
            rows.per_head(2),
            strict=True,
        )
    ):
        expected = torch.nn.functional.cross_entropy(speculator.output(index)(state)[counts], wanted[counts])
        torch.testing.assert_close(found[index], expected)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"own_share": 1.0}, {"learning_rate": 0.0}, {"sequence_length": 4}, {"inner_dim": 0}],
)
def test_what_cannot_be_trained_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SpeculatorTraining(**{"steps": 1, **wrong})
