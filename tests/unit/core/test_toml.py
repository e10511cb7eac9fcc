"""TOML text: what is written reads back."""

import tomllib

import pytest

from penstock.core.toml import toml_text

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
