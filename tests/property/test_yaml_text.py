"""What is written as YAML is read back unchanged."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.yaml_text import yaml_text

TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        "on",
        "No",
        "1",
        "1e3",
        "0x1f",
        "a: b",
        "a #b",
        "- a",
        "a\nb",
        "a\n\n b\n",
        "2026-01-01",
        "a\n",
        "~",
        "=",
        "<<",
        "a:b",
        "1:30",
        ".inf",
        ".5",
        "._1",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_values_are_read_back_from_their_text(values):
    assert yaml.safe_load(yaml_text(values) or "{}") == values
