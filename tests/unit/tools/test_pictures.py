"""The pictures of the documentation can be drawn, and those in docs/pictures are there in both themes."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tools.pictures import OUT, ROOT, THEMES, CorpusOrder, StepTimeline, draw_order, draw_overlap, order_of

from penstock.testing.corpora import numbered_corpus

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    return order_of(numbered_corpus(tmp_path_factory.mktemp("order") / "c", [256] * 192))


def fills(picture):
    return [rect.get("fill") for rect in ET.fromstring(picture).iter(f"{SVG}rect")]


def test_the_order_drawn_is_that_of_the_loader(order: CorpusOrder):
    assert sorted(block for pool in order.pools for block in pool) == list(range(192))
    assert (order.lanes, order.block_tokens) == (3, 256)
    assert order.steps[0] == [0, 1, 2] * 4
    assert set(order.steps[-1]) <= set(range(9, 12)), "the last pools are read last"


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_every_block_and_row_of_an_order_is_drawn(order, theme):
    drawn = fills(draw_order(order, theme))
    rows = 7 * 12
    lanes, frame = 3, 1
    assert len(drawn) == 192 + rows + lanes + frame
    assert drawn.count(theme.rule) == 192 - 6 * 16, "all but the first two pools of each lane are grey"


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_blocks_and_traffic_are_drawn_on_one_scale_of_time(theme):
    sent = [(moment / 10, 1000 * moment) for moment in range(11)]
    short = StepTimeline(label="short", blocks=[("forward", 0.0, 0.5)], sent=sent)
    long = StepTimeline(
        label="long", blocks=[("backward", 0.0, 1.0)], sent=[(2 * moment, count) for moment, count in sent]
    )
    picture = ET.fromstring(draw_overlap([long, short], theme))
    widths = {rect.get("fill"): float(rect.get("width")) for rect in picture.iter(f"{SVG}rect")}
    assert widths[theme.series[1]] == pytest.approx(2 * widths[theme.series[0]], rel=0.02)
    assert len(list(picture.iter(f"{SVG}polygon"))) == 2


def test_every_picture_of_the_documentation_is_small_and_there_in_both_themes():
    named = {path.name for path in OUT.iterdir()}
    assert named
    for name in named:
        light, dark = (re.sub("(light|dark)", theme, name) for theme in ("light", "dark"))
        assert {light, dark} <= named
        assert (OUT / name).stat().st_size < 200_000, name


def test_every_picture_is_shown_by_a_page():
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *Path(ROOT / "docs").rglob("*.md")])
    for path in OUT.iterdir():
        assert path.name in pages
