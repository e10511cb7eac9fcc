"""Options of an evaluation out of range."""

import pytest

from penstock.core.errors import UsageError
from penstock.evaluation.options import EvaluationOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shots": -1}, "shots"),
        ({"limit": 0}, "limit"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
        ({"fewshot_seed": -1}, "fewshot_seed"),
        ({"bootstrap": -1}, "bootstrap"),
        ({"system": " "}, "system message is empty"),
    ],
)
def test_out_of_range(options, message):
    with pytest.raises(UsageError, match=message):
        EvaluationOptions(**options)
