"""Tables of alternatives: lazy, and helpful about unknown names."""

import subprocess
import sys

import pytest

from penstock.core.errors import UsageError
from penstock.core.table import Table

TABLE = Table("shape", {"square": "math:sqrt", "gone": "penstock.no_such_module:x", "round": "math:pi"})


def test_a_name_gives_its_object() -> None:
    import math

    assert TABLE["square"] is math.sqrt


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"Unknown shape \(got 'sqare'\)\. Did you mean 'square'\?"):
        TABLE["sqare"]


def test_names_are_listed_counted_and_looked_up_without_importing_anything() -> None:
    assert list(TABLE) == ["square", "gone", "round"]
    assert len(TABLE) == 3
    assert "gone" in TABLE
    assert "sqare" not in TABLE


def test_a_module_is_imported_only_when_its_row_is_asked_for() -> None:
    code = """
import sys
from penstock.core.table import Table
table = Table("parser", {"dom": "xml.dom.minidom:parse"})
assert "xml.dom.minidom" not in sys.modules
table["dom"]
assert "xml.dom.minidom" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
