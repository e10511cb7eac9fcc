"""TOML text: what is written reads back; names in quotes, in lists with commas too."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.options import shares
from penstock.core.config import override
from penstock.core.errors import UsageError
from penstock.core.toml import listed_names, toml_text
from tests.examples import examples

VALUES = [
    {},
    {"a": 1, "b": 1e-8, "c": True, "d": "x"},
    {
        "run": {"dir": "runs/ü\n\"'\\\x00\x7f"},
        "data": {"corpora": {"my corpus": {"path": "p"}, "b.c": {"w": 0.5}}},
    },
    {"empty": {}, "list": [1, "two", [3.0], {"four": 4}], "after": {"deep": {"deeper": {"x": -1}}}},
]


@pytest.mark.parametrize("values", VALUES)
def test_the_text_reads_back_as_the_values(values):
    assert tomllib.loads(toml_text(values)) == values


def test_keys_without_a_value_are_left_out():
    assert tomllib.loads(toml_text({"a": None, "b": {"c": None, "d": 1}})) == {"b": {"d": 1}}


def quoted(name):
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


@given(st.dictionaries(st.text("ab=,.\"'\\ \n\x7fé", min_size=1), st.floats(0, 1), min_size=1))
@examples(300)
def test_a_name_in_quotes_may_have_any_character_wherever_it_is_typed(given):
    text = ",".join(f"{quoted(name)}={share!r}" for name, share in given.items())
    assert shares([text], option="--set") == given
    assert listed_names(",".join(map(quoted, given))) == list(given)
    settings = [f"data.corpora.{quoted(name)}.weight={share!r}" for name, share in given.items()]
    assert override({}, settings)["data"]["corpora"] == {n: {"weight": s} for n, s in given.items()}


@pytest.mark.parametrize("text", ['"a,b=0.2', '"a\\q"=0.2', "'a=0.2"])
def test_quotes_that_are_not_tomls_are_refused(text):
    with pytest.raises(UsageError, match=r"name in quotes is not valid TOML|takes CORPUS=SHARE"):
        shares([text], option="--set")
