"""Whatever a damaged file leads its reader to is one error that names the file."""

import struct

import pyarrow as pa
import pytest

from penstock.core.errors import CorpusError
from penstock.data.formats.damaged import Malformed, reading


@pytest.mark.parametrize(
    ("led_to", "why"),
    [
        (Malformed("its footer is cut off\nat byte 7"), "its footer is cut off"),
        (struct.error("unpack requires 4 bytes"), "an offset leads outside its message"),
        (pa.ArrowInvalid("no schema"), "no schema"),
        (MemoryError(), "it asks for too much memory"),
        (OSError("too short"), "too short"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_reading_damage_leads_to_names_the_file(led_to: Exception, why: str) -> None:
    with pytest.raises(CorpusError) as told, reading("a.parquet"):
        raise led_to
    said = f"a.parquet cannot be read: {why}. It is truncated or altered: restore it or make it again."
    assert str(told.value) == said


def test_a_fault_of_ours_is_not_blamed_on_a_file() -> None:
    with pytest.raises(KeyError), reading("a.parquet"):
        raise KeyError("column")
