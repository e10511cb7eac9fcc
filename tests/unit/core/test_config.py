"""Configs: TOML and overrides in, checked dataclasses out; every mistake is named."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.options import shares
from penstock.core.config import build, dump, fingerprint, listed_names, load_json, load_toml, override
from penstock.core.errors import ConfigError, UsageError
from tests.examples import examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = 0.5
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    flag: bool = False
    size: int = 1
    rule: Literal["fast", "slow"] = "fast"
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[str, ...] = ()
    inner: Inner = field(default_factory=Inner)
    table: dict[str, Inner] = field(default_factory=dict)
    either: Inner | None = None


FULL = {
    "name": "x",
    "flag": True,
    "size": 3,
    "rule": "slow",
    "pair": [4, 5.5],
    "many": ["a", "b"],
    "inner": {"rate": 2.5, "count": 7},
    "table": {"one": {"count": 1}, "two": {}},
    "either": {"rate": 1.5},
}


def test_every_kind_of_field_is_built_from_plain_values() -> None:
    assert build(Outer, FULL) == Outer(
        name="x",
        flag=True,
        size=3,
        rule="slow",
        pair=(4, 5.5),
        many=("a", "b"),
        inner=Inner(rate=2.5, count=7),
        table={"one": Inner(count=1), "two": Inner()},
        either=Inner(rate=1.5),
    )


def test_building_what_was_dumped_gives_an_equal_config() -> None:
    config = build(Outer, FULL)
    assert build(Outer, dump(config)) == config
    assert build(Outer, dump(Outer(name="y"))) == Outer(name="y")


def test_an_int_becomes_a_float_where_one_is_asked_for_and_nothing_else_is_coerced() -> None:
    rate = build(Inner, {"rate": 2}).rate
    assert (rate, type(rate)) == (2.0, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nmae": "x"}, r"Unknown key nmae\. Did you mean 'name'\?"),
        ({"rate": 1}, r"Unknown key rate\. Did you mean 'inner\.rate'\?"),
        ({"zzz": 1}, r"Unknown key zzz\. Known: either, flag, inner, many, name, pair, rule, size, table\."),
        ({"inner": {"rat": 1}}, r"Unknown key inner\.rat\. Did you mean 'rate'\?"),
        ({"table": {"one": {"rat": 1}}}, r"Unknown key table\.one\.rat"),
        ({"name": 3}, r"name must be text \(got 3\)\. Write it in quotes"),
        ({"size": 3.0}, r"size must be a whole number \(got 3\.0\)"),
        ({"size": True}, r"size must be a whole number \(got True\)"),
        ({"size": None}, r"size must be a whole number \(got None\)"),
        ({"flag": 1}, r"flag must be true or false \(got 1\)"),
        ({"inner": {"rate": True}}, r"inner\.rate must be a number \(got True\)"),
        ({"inner": {"rate": "0.5"}}, r"inner\.rate must be a number \(got '0\.5'\)"),
        ({"inner": {"count": "7"}}, r"inner\.count must be a whole number \(got '7'\)"),
        ({"inner": 3}, r"inner must be a section \(got 3\)"),
        ({"either": 3}, r"either must be a section \(got 3\)"),
        ({"table": ["one"]}, r"table must be a table of sections \(got \['one'\]\)"),
        ({"size": 10**20}, r"size must be from -2\*\*62 to 2\*\*62 \(got '1\.000e\+20'\)"),
        pytest.param({"size": 10**5000}, r"size must be from .* bits", id="5001 digits"),
        ({"inner": {"rate": float("nan")}}, r"inner\.rate must be a finite number \(got nan\)"),
        ({"pair": [1, float("-inf")]}, r"pair\[1\] must be a finite number \(got -inf\)"),
        ({"rule": "fats"}, r"rule has no such choice \(got 'fats'\)\. Did you mean 'fast'\?"),
        ({"pair": [1]}, r"pair must be a list of 2 \(a whole number, a number\) \(got \[1\]\)"),
        ({"pair": [1, "x"]}, r"pair\[1\] must be a number \(got 'x'\)"),
        ({"many": ["a", 1]}, r"many\[1\] must be text \(got 1\)"),
        ({"many": "abc"}, r"many must be a list \(each text\) \(got 'abc'\)"),
    ],
    ids=str,
)
def test_a_wrong_key_or_type_is_named_with_its_path_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Outer, {**FULL, **change})


def test_a_missing_key_is_named_with_its_section() -> None:
    with pytest.raises(ConfigError, match=r"Missing key name\. Add it to the recipe"):
        build(Outer, {})
    with pytest.raises(ConfigError, match=r"Missing key run\.name\. Add it to \[run\]"):
        build(Outer, {}, where="run")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("a.b=2", 2),
        ("a.b=2.5e-3", 0.0025),
        ("a.b=true", True),
        ("a.b='2'", "2"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=runs/first", "runs/first"),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        (" a.b = 2 ", 2),
    ],
)
def test_a_setting_is_toml_or_else_text(setting: str, value: Any) -> None:
    assert override({"a": {"b": 1, "c": 3}}, [setting]) == {"a": {"b": value, "c": 3}}


def test_a_quoted_part_of_a_key_may_hold_dots_spaces_and_equals_signs() -> None:
    assert override({}, ['a."my = w.eb".p=c1', "a.'x\\y'=1"]) == {"a": {"my = w.eb": {"p": "c1"}, "x\\y": 1}}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run..steps=5", "empty segment"),
        (".a=1", "empty segment"),
        ("a.=1", "empty segment"),
        ("a=5\nfoo=7", "must be one line"),
        ('a."b=1', "--set takes"),
        (r'a."\q"=1', "not valid TOML"),
    ],
)
def test_a_setting_with_a_malformed_key_or_a_second_line_is_refused(setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        override({}, [setting])


def test_a_byte_order_mark_is_skipped_and_a_folder_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes('\ufeffname = "é"'.encode())
    assert load_toml(path) == {"name": "é"}
    with pytest.raises(UsageError, match="is a folder"):
        load_toml(tmp_path)


def test_a_recipe_may_come_through_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'name = "x"')
    os.close(writer)
    assert load_toml(Path(f"/dev/fd/{reader}")) == {"name": "x"}
    os.close(reader)


def test_settings_make_sections_that_are_missing_and_the_last_one_wins() -> None:
    assert override({}, ["a.b.c=1", "a.b.c=2", "a.d=3"]) == {"a": {"b": {"c": 2}, "d": 3}}


def test_settings_leave_the_values_they_are_laid_over_as_they_were() -> None:
    raw = {"a": {"b": 1}}
    override(raw, ["a.b=2"])
    assert raw == {"a": {"b": 1}}


@pytest.mark.parametrize("setting", ["a.b", "=1", ""])
def test_a_setting_without_a_key_or_value_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match=r"--set takes section\.key=value"):
        override({}, [setting])


def test_a_setting_inside_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"b in --set a\.b\.c=2 is a value, not a section \(got 1\)"):
        override({"a": {"b": 1}}, ["a.b.c=2"])


def test_a_text_with_the_character_nul_is_refused_by_key() -> None:
    for raw, key in (({"name": "a\0b"}, "name"), ({"name": "a", "many": ["b", "\0"]}, r"many\[1\]")):
        with pytest.raises(ConfigError, match=f"{key} contains the character NUL"):
            build(Outer, raw)


def test_a_missing_recipe_and_broken_toml_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml does not exist"):
        load_toml(tmp_path / "none.toml")
    path = tmp_path / "broken.toml"
    path.write_text("[run]\nsteps = \n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML: .*line 2"):
        load_toml(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"is not valid TOML: .*decode"):
        load_toml(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", r"must contain a JSON object \(got 'list'\)"),
    ],
    ids=["cut", "not text", "too deep", "list"],
)
def test_json_that_is_no_object_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_json(path)


def test_a_fingerprint_depends_on_values_and_not_on_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": [2, 3]}) == fingerprint({"b": [2, 3], "a": 1})
    assert fingerprint({"a": 1, "b": [2, 3]}) != fingerprint({"a": 1, "b": [3, 2]})
    assert fingerprint({"a": 1}) == "1f8c00645b7df6ce", "it is written in manifests and states"


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
