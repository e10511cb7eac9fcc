"""What all unit tests share."""

from collections.abc import Iterator
from subprocess import PIPE
from types import SimpleNamespace

import pytest

from penstock.text import template_process
from tests.warm import Process


@pytest.fixture(autouse=True, scope="package")
def forked_templates() -> Iterator[None]:
    """Fork the processes of templates, where an interpreter takes 0.1 CPU-s, from one with their imports.

    tests/integration/test_template_process.py and tests/e2e start interpreters.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_process, "subprocess", SimpleNamespace(Popen=Process, PIPE=PIPE))
        yield
