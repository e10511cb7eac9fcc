"""What benchmarks/console_peers_page.py makes of the points that a tool was given and of those it drew."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from console_peers_page import delays


def test_a_point_waits_for_the_first_drawing_that_has_it_or_a_newer_one():
    found = delays({301: 10, 302: 20, 303: 30}, [(300, 5), (302, 25), (303, 70), (303, 90)])
    assert found == {"delay_ms": [15, 5, 40]}


def test_points_that_a_tool_does_not_draw_are_filed_beside_those_it_draws():
    found = delays({301: 10, 302: 20, 303: 30}, [(301, 25)])
    assert found == {"delay_ms": [15], "failed": "2 of 3 points not drawn within 60 s"}


def test_a_tool_that_draws_no_point_has_no_delay():
    found = delays({301: 10}, [(300, 5)])
    assert found == {"failed": "1 of 1 points not drawn within 60 s"}
