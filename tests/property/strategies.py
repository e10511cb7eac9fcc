"""Hypothesis strategies shared by the loader's properties."""

from hypothesis import strategies as st

# Empty, one-token and huge documents are in every draw's reach: they broke other loaders.
LENGTHS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 60), st.integers(300, 900)), min_size=1, max_size=80
).filter(lambda lengths: sum(lengths) > 0)

RULES = st.sampled_from(["concat", "best_fit"])
"""Packing that serves a corpus exactly."""

PACKINGS = st.sampled_from(
    [{"packing": "concat"}, {"packing": "best_fit"}, {"packing": "whole", "overlong": "truncate"}]
)
"""All packing, as arguments of a loader."""
