"""Metrics as Prometheus and Kubeflow Trainer get them, and what deploy/monitoring asks of the endpoints."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import promql_parser
import pytest
import yaml

from penstock.obs.metric_names import training_metric
from penstock.obs.sinks.jsonl import read_records
from tests.ports import free_port
from tests.status_server import status_server
from tests.warm import Command, penstock

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"


@contextmanager
def training(recipe, *settings, **variables):
    """Train until the block ends, then stop as a scheduler does; the run must save and exit with 75."""
    words = [word for setting in ("run.steps=1000000", *settings) for word in ("--set", setting)]
    command = ["train", recipe, *words]
    with Command(*command, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables}) as process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 75, errors
        finally:
            process.kill()


def wait_for(condition, process):
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def page(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def published(tmp_path_factory, corpus, tiny_server):
    """Names of the series at the endpoints of a server and of a training run."""
    with tiny_server.http() as http:
        http.get("/v1/models")  # requests are counted from the first
        names = set(re.findall(r"^(\w+)", http.get("/metrics").text, re.MULTILINE))
    names.add(training_metric("mfu"))  # not there if other work disturbed the measurement of the peak
    folder = tmp_path_factory.mktemp("watched")
    recipe = folder / "recipe.toml"
    recipe.write_text(f"""
compute = "float32"
[run]
dir = "{folder / "run"}"
steps = 40
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
[data]
sequence_length = 32
global_batch_size = 12
holdout = 0.1
[data.corpora.python]
path = "{corpus}"
[validate]
every = 2
samples = 2
[measure]
metrics_port = {(port := free_port())}
""")
    with training(recipe) as process:
        wait_for(lambda: "penstock_train_validation_loss" in page(port), process)
        return names | set(re.findall(r"^(\w+)", page(port), re.MULTILINE))


def metrics_of(query):
    """Return the names of the series of a query, by a parser of PromQL."""
    query = query.replace("$run", ".*").replace("$instance", ".*")
    found, waiting = set(), [promql_parser.parse(query)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)
        elif isinstance(node, promql_parser.MatrixSelector | promql_parser.SubqueryExpr):
            waiting.append(getattr(node, "vector_selector", None) or node.expr)
        else:
            waiting += [getattr(node, name) for name in ("lhs", "rhs", "expr") if hasattr(node, name)]
            waiting += getattr(node, "args", [])
    return found


def queries():
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
    yield from ((rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"])
    board = json.loads((FOLDER / "dashboard.json").read_text())
    for panel in board["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))


@pytest.mark.parametrize(("title", "query"), [*queries()])
def test_every_query_asks_for_metrics_that_the_endpoints_have(published, title, query):
    asked = metrics_of(query)
    assert asked, title
    assert asked <= published, title


def test_the_variables_of_the_dashboard_are_labels_that_the_endpoints_have(published):
    board = json.loads((FOLDER / "dashboard.json").read_text())
    asked = [
        variable["definition"] for variable in board["templating"]["list"] if variable["type"] == "query"
    ]
    assert {re.match(r"label_values\((\w+), \w+\)", text).group(1) for text in asked} <= published
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_alerts_fire_when_they_should_and_not_else():
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip(
            "NO PROMTOOL (Debian's package prometheus): deploy/monitoring/alerts.test.yaml was not run"
        )
    for words in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts.test.yaml"]):
        done = subprocess.run([promtool, *words], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_port_in_use_is_refused_before_the_first_step(recipe):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = penstock("train", recipe, "--set", f"measure.metrics_port={port}")
    assert done.returncode == 1
    assert (
        f"measure.metrics_port cannot be opened at 127.0.0.1: Address already in use (got {port})"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    done = penstock("train", recipe, "--set", "measure.metrics_port=70000")
    assert done.returncode == 2
    assert "measure.metrics_port is no TCP port (got 70000)" in done.stderr


def test_a_run_in_a_trainjob_reports_its_progress(recipe, tmp_path):
    with status_server(tmp_path / "pod") as (controller, told):
        done = penstock(
            "train",
            recipe,
            env={
                **os.environ,
                "KUBEFLOW_TRAINER_SERVER_URL": told.url,
                "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(told.ca_file),
                "KUBEFLOW_TRAINER_SERVER_TOKEN": str(told.token_file),
            },
        )
    assert done.returncode == 0, done.stderr
    last = controller.reports[-1]
    assert last["progressPercentage"] == 100
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    (loss,) = [record["loss"] for record in records if record["step"] == 40 and "loss" in record]
    assert metrics["step"] == "40"
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert set(metrics) == {"loss", "tokens_per_second", "validation_loss", "tokens", "step"}


def test_a_controller_that_hangs_costs_a_run_no_step(recipe, tmp_path):
    with status_server(tmp_path / "pod") as (controller, told):
        controller.hangs.set()
        variables = {
            "KUBEFLOW_TRAINER_SERVER_URL": told.url,
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(told.ca_file),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(told.token_file),
        }
        metrics = tmp_path / "run" / "metrics.jsonl"
        with training(recipe, **variables) as process:
            wait_for(controller.asked.is_set, process)
            before = metrics.read_text().count('"loss"')
            wait_for(lambda: metrics.read_text().count('"loss"') >= before + 20, process)
    assert not controller.reports
