"""Pieces of an answer as events of `/v1/responses`."""

from penstock.engine.request import Piece
from penstock.serve.errors import ApiError
from penstock.serve.response_writer import ResponseWriter
from penstock.serve.schema.generation import PromptTokensDetails, Usage
from penstock.serve.schema.responses import ResponseReply, ResponseText

USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=2,
    total_tokens=5,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=1),
)


def writer():
    frame = ResponseReply(
        id="r",
        created_at=1,
        model="m",
        status="in_progress",
        instructions=None,
        max_output_tokens=None,
        metadata={},
        temperature=1,
        text=ResponseText(format={"type": "text"}),
        top_p=1,
    )
    return ResponseWriter(frame, message_id="msg")


def test_an_answer_that_ends_by_itself_is_completed():
    made = writer()
    pieces = [
        Piece(request_id=0, text="a"),
        Piece(request_id=0),
        Piece(request_id=0, text="b", finish="stop"),
    ]
    events = [*made.begin(), *(event for piece in pieces for event in made.take(piece)), *made.end(USAGE)]
    assert [event.delta for event in events if event.delta] == ["a", "b"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    reply = events[-1].response
    assert (events[-1].type, reply.status, reply.incomplete_details) == (
        "response.completed",
        "completed",
        None,
    )
    assert reply.output[0].content[0].text == "ab"
    assert (reply.usage.input_tokens_details.cached_tokens, reply.usage.total_tokens) == (1, 5)


def test_an_answer_that_fails_says_why_in_its_last_event():
    made = writer()
    num_events = len(list(made.begin()))
    event = made.failed(ApiError(504, "It took too long."))
    assert (event.type, event.sequence_number) == ("response.failed", num_events)
    assert (event.response.status, event.response.error.message) == ("failed", "It took too long.")
