"""Configs and chat templates are read by programs that must start without torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "penstock.models",
        "penstock.models.decoder.config",
        "penstock.text.chat_template",
        "penstock.train.inspect.audit",
    ],
)
def test_the_module_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
