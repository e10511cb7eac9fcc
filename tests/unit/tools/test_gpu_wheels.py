import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.gpu_wheels import NEEDS, Need, Wheel, collect, main, pins_of, report, requires_of

ROOT = Path(__file__).parents[3]

SHELF = {  # requirement -> bytes, what it requires
    "web==2.0": (400, ["wire>=1", "parts"]),
    "wire==1.5": (100, []),
    "parts": (50, ["wire"]),
    "big==9.0": (900, []),
    "big==4.0": (300, []),
    "small": (10, []),
}
PINS = {"web": "2.0", "wire": "1.5", "big": "9.0"}


def fetch(wanted):
    size, requires = SHELF[str(wanted)]
    version = str(wanted.specifier).removeprefix("==") or "1.0"
    return Wheel(wanted.name, version, size, tuple(map(Requirement, requires)))


def collected(*needs, have=(), limit):
    return collect(needs, frozenset(have), limit_bytes=limit, fetch=fetch, pins=PINS)


WEB, BIG, SMALL = Need("web", "web"), Need("big", "big", smaller=("4.0",)), Need("small", "small")


@pytest.mark.parametrize(
    ("have", "limit", "names"),
    [
        ((), 2000, {"web": "2.0", "wire": "1.5", "parts": "1.0", "big": "9.0", "small": "1.0"}),
        (("wire",), 2000, {"web": "2.0", "parts": "1.0", "big": "9.0", "small": "1.0"}),
        (("web", "big", "small"), 2000, {}),
        ((), 1000, {"web": "2.0", "wire": "1.5", "parts": "1.0", "big": "4.0", "small": "1.0"}),
        ((), 800, {"web": "2.0", "wire": "1.5", "parts": "1.0", "small": "1.0"}),
        ((), 9, {}),
    ],
    ids=[
        "everything",
        "one dependency is there",
        "all are there",
        "a smaller version",
        "left out",
        "no room",
    ],
)
def test_needs_are_taken_in_order_with_what_they_require_within_the_limit(have, limit, names):
    found = collected(WEB, BIG, SMALL, have=have, limit=limit)
    assert {wheel.name: wheel.version for wheel in found.wheels} == names
    assert found.num_bytes <= limit
    asked = {"web", "big", "small"} - set(have)
    assert {need.name for need, _ in found.left_out} == asked - names.keys()
    assert found.smaller == (((BIG, 900),) if names.get("big") == "4.0" else ())


def test_what_is_left_out_is_named_with_its_smallest_size():
    text = report(collected(BIG, SMALL, limit=100), out=Path("w"), limit_bytes=100 * 2**20)
    assert "left out: big, 0.00 MiB, for big" in text
    assert "pip install --no-index --no-deps --target site-packages w/*.whl" in text


def test_requirements_are_those_of_the_python_that_is_asked_for():
    metadata = "\n".join(
        [
            "Name: x",
            "Requires-Dist: always>=2",
            'Requires-Dist: old; python_version < "3.12"',
            'Requires-Dist: windows; sys_platform == "win32"',
            'Requires-Dist: more; extra == "more"',
        ]
    )
    assert [one.name for one in requires_of(metadata, python="3.11")] == ["always", "old"]
    assert [one.name for one in requires_of(metadata, python="3.13")] == ["always"]


def test_every_dependency_of_penstock_can_be_carried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *extras["torch"], *extras["remote"], *extras["serve"]]
    named = {canonicalize_name(Requirement(one).name) for one in stated} - {"penstock"}
    assert named <= {need.name for need in NEEDS} | {"torch", "jinja2"}


def test_pins_are_those_of_the_constraints_by_canonical_name():
    pins = pins_of((ROOT / "constraints.txt").read_text())
    assert pins["jinja2"].count(".") == 2
    assert pins["numpy"] != pins["pyarrow"]


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--python", "12"], "such as 3.12 (got '12')"), (["--out", "."], ". exists")],
)
def test_a_wrong_option_is_refused_before_anything_is_fetched(words, told, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert told in capsys.readouterr().err
