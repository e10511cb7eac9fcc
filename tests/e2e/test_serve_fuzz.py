"""Requests drawn from the server's own OpenAPI document, and near it: every answer is one it knows."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given
from requests import Session
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.examples import examples
from tests.serving import PATIENCE_S, end, make_model, serving

NOT_CHECKED = [
    positive_data_acceptance,  # the document does not know the context's length, nor the model's name
    negative_data_rejection,  # a message that is wrong as one kind may be right as another
]
FEW = examples(20, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("served") / "tiny", context=256)
    words = ("--cache-gib", "0.01", "--max-sequences", "16", "--max-output-tokens", "3")
    with serving(folder, *words) as running:
        yield running
        assert running.metric("penstock_cache_blocks_used") == 0
        assert running.metric("penstock_answers_running") == 0
        assert end(running) == 0
        assert "Traceback" not in running.errors.read_text()


def ask(session, operation, mode):
    """Send requests drawn for one route; return the statuses of their answers."""
    statuses = set()

    @FEW
    @given(case=operation.as_strategy(mode))
    def one(case):
        reply = case.call(session=session, timeout=PATIENCE_S)
        statuses.add(reply.status_code)
        case.validate_response(reply, excluded_checks=NOT_CHECKED)

    one()
    return statuses


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_drawn_request_gets_an_answer_that_the_document_knows(server, mode):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=PATIENCE_S)
    operations = [found.ok() for found in document.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:
        operations = [operation for operation in operations if operation.body]  # the others take anything
    with Session() as session:
        statuses = {operation.path: ask(session, operation, mode) for operation in operations}
    assert server.process.poll() is None
    if mode is GenerationMode.NEGATIVE:
        assert all(400 in found <= {200, 400} for found in statuses.values()), statuses
    else:
        assert statuses["/v1/models"] == {200}
        assert 200 in statuses["/v1/chat/completions"]
