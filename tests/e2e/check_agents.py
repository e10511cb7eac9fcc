"""Clients of agents and tools, as released, against a tiny served model: `make soak PART=agents`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import make_model, serving

ROOT = Path(__file__).parents[2]
SCRIPTS, CLIENTS = ROOT / "tests" / "clients", ROOT / ".agents"
PYTHON = CLIENTS / "venv" / "bin" / "python"
FROM_PYPI = [
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai]==2.68.0",
    "litellm==1.110.2",
    "langchain-openai==1.7.4",
    "inspect-ai==0.3.285",
]
FROM_NPM = ["ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"]
KINDS = {"plain", "streamed", "tool", "json_schema"}
OF_LANGCHAIN = {"ContextOverflowError", "ModelNotFoundError", "ModelAPIError"}
CASES = {
    "openai_agents.py": {"OpenAIChatCompletionsModel": KINDS, "OpenAIResponsesModel": KINDS},
    "pydantic_agents.py": {"OpenAIChatModel": KINDS, "OpenAIResponsesModel": KINDS},
    "litellm_client.py": {
        "chat": KINDS,
        "responses": KINDS,
        "anthropic": {"plain"},
        "errors": {"context", "model", "timeout", "rate limit"},
    },
    "langchain_client.py": {"chat": {*KINDS, *OF_LANGCHAIN}, "responses": {*KINDS, *OF_LANGCHAIN}},
    "inspect_client.py": {
        "chat": {"plain", "tool", "json_schema", "context"},
        "responses": {"plain", "tool", "json_schema", "context"},
    },
    "vercel.mjs": {"chat": KINDS, "responses": KINDS, "compatible": KINDS},
}


@pytest.fixture(scope="module")
def clients():
    """Install the clients where they are not: some minutes and 1.5 GB."""
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", CLIENTS / "venv"], check=True)
        subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", *FROM_PYPI], check=True)
    if not (CLIENTS / "node_modules").exists():
        words = ["--no-audit", "--no-fund", "--silent", "--prefix", CLIENTS]
        subprocess.run(["npm", "install", *words, *FROM_NPM], check=True)
    return CLIENTS


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Addresses of a server, and of one that is hurried."""
    folder = make_model(tmp_path_factory.mktemp("served") / "tiny")
    hurried = ("--max-open", 2, "--deadline-s", 1)
    with serving(folder, "--cache-gib", 0.05) as one, serving(folder, "--cache-gib", 0.05, *hurried) as other:
        yield one.url, other.url


@pytest.mark.xdist_group("agents")
@pytest.mark.timeout(1500)  # the first one installs
@pytest.mark.parametrize("script", CASES)
def test_a_client_can_do_all_that_it_does_with_openai(clients, servers, script):
    program = [PYTHON] if script.endswith(".py") else ["node"]
    command = [*program, SCRIPTS / script, *servers, clients]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    passed = {tuple(line.split(maxsplit=1)) for line in done.stdout.splitlines()}
    assert passed == {(route, kind) for route, kinds in CASES[script].items() for kind in kinds}
