"""Commands that are forked from the warm parent: what the tests that share it rely on."""

import os
import signal

from penstock import __version__
from tests import warm
from tests.warm import Command, children, penstock


def test_a_command_is_forked_after_the_warm_parent_was_killed():
    assert penstock("--version").stdout.split() == ["penstock", __version__]
    parent = warm._parent().process
    parent.kill()
    parent.wait()
    assert penstock("--version").stdout.split() == ["penstock", __version__]
    assert warm._parent().process.pid != parent.pid


def test_a_command_that_is_killed_is_a_child_with_the_code_of_its_signal(tmp_path):
    before = children()
    with Command("console", tmp_path, "--port", 0, stdout=-1) as command:
        command.stdout.readline()
        assert children() - before == {command.pid}
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
    assert children() == before
