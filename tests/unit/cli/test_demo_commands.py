"""Steps of the demo: each has a title, and the time that it took once the next begins."""

import re

from penstock.cli.demo_commands import Steps


def test_each_step_ends_with_its_time_once(capsys):
    steps = Steps()
    steps.begin("1. Prepare")
    steps.begin("2. Train")
    steps.end()
    steps.end()
    shown = capsys.readouterr().out
    assert re.fullmatch(r"\n== 1\. Prepare\n   [\d.]+ s\n\n== 2\. Train\n   [\d.]+ s\n", shown)
