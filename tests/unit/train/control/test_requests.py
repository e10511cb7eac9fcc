"""The channel as files: numbers that are never used twice, and whatever may lie in the folder."""

import json
import os
from dataclasses import asdict

import pytest

from penstock.core.errors import PenstockError, UsageError
from penstock.core.files import exclusive
from penstock.train.control.requests import (
    ControlReply,
    ControlRequest,
    answer,
    answers,
    batch_size_of,
    job_is_running,
    open_requests,
    read_answer,
    read_request,
    request_file,
    set_aside,
    submit,
)

GOOD = ControlRequest(weights={"web": 0.6}, reason="more web")


def put(run, content, number=1):
    path = request_file(run, number)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def test_a_request_is_read_back_under_its_number_and_open_until_it_is_answered(tmp_path):
    assert open_requests(tmp_path) == []
    assert (submit(tmp_path, GOOD), submit(tmp_path, ControlRequest(extend="web"))) == (1, 2)
    assert open_requests(tmp_path) == [1, 2]
    assert read_request(tmp_path, 1) == ControlRequest(number=1, weights={"web": 0.6}, reason="more web")
    answer(
        tmp_path, ControlReply(number=1, taken_up=True, said="so be it", weights={"web": 1.0}, samples=(3, 9))
    )
    assert open_requests(tmp_path) == [2]
    assert [asdict(found) for found in answers(tmp_path)] == [asdict(read_answer(tmp_path, 1))]
    assert read_answer(tmp_path, 1).samples == (3, 9)
    assert read_answer(tmp_path, 2) is None


def test_the_batch_size_in_force_is_the_newest_that_was_set_until_the_recipe_sets_another(tmp_path):
    assert batch_size_of(tmp_path, step=0) is None
    replies = (
        {"taken_up": True, "batch_size": 8, "holds_from": 3},
        {"taken_up": True, "batch_size": 24, "holds_from": 6, "until": 20},
        {"taken_up": False},
    )
    for number, values in enumerate(replies, start=1):
        submit(tmp_path, GOOD)
        answer(tmp_path, ControlReply(number=number, said="", **values))
    assert [batch_size_of(tmp_path, step=step) for step in (6, 19, 20)] == [24, 24, None]


def test_a_number_is_never_used_twice_even_after_a_request_was_set_aside(tmp_path):
    put(tmp_path, b"no JSON", number=7)
    set_aside(tmp_path, 7)
    assert submit(tmp_path, GOOD) == 8
    assert open_requests(tmp_path) == [8]
    assert not list(request_file(tmp_path, 8).parent.glob(".*")), "no draft is left"


def test_a_request_that_was_just_written_by_another_is_not_overwritten(tmp_path, monkeypatch):
    submit(tmp_path, GOOD)
    monkeypatch.setattr(
        "penstock.train.control.requests._numbers", lambda *_, **__: set()
    )  # it was listed before
    assert submit(tmp_path, ControlRequest(extend="code")) == 2
    assert read_request(tmp_path, 1).weights == {"web": 0.6}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 60_000, "is not valid JSON"),
        ([1], "must contain a JSON object"),
        (b'{"weights": {}' + b" " * 70_000 + b"}", "has more than 65,536 bytes"),
        ({"wieghts": {"web": 1}}, "Unknown key wieghts. Did you mean 'weights'"),
        ({"weights": {"web": "much"}}, "weights.web must be a number"),
        ({"weights": {"web": 1.5}}, "share of corpus 'web' must be between 0 and 1 (got 1.5)"),
        ({"weights": {"web": 0.7, "code": 0.7}}, "Shares must sum to at most 1"),
        ({"weights": {}}, "Shares must sum to at most 1"),
        (b'{"weights": {"web": NaN}}', "must be a finite number"),
        ({}, "exactly one of weights, skip_steps, extend, islands, batch_size, checkpoint and stop"),
        ({"stop": True, "checkpoint": True}, "exactly one of weights"),
        ({"stop": 1}, "stop must be"),
        ({"batch_size": 0}, "A step has at least one row (got 0)"),
        ({"stop": True, "asked_by": "a\nb"}, "A name must be one line"),
        (
            {"weights": {"web": 1}, "extend": "web"},
            "exactly one of weights, skip_steps, extend, islands, batch_size, checkpoint and stop",
        ),
        ({"islands": 0}, "at least one island (got 0)"),
        ({"extend": "web", "at_step": 3}, "at_step needs weights"),
        ({"weights": {"web": 1}, "at_step": -3}, "at_step needs weights, and must be zero or more (got -3)"),
        ({"skip_steps": [3, 3]}, "a step, 1 or more, and a later one"),
        ({"skip_steps": [0, 3]}, "a step, 1 or more, and a later one"),
        ({"skip_steps": [1]}, "skip_steps must be a list of 2"),
        ({"weights": {"web": 1}, "reason": "x" * 501}, "one line of at most 500 characters"),
        ({"weights": {"web": 1}, "reason": "\x1b[2J"}, "one line of at most 500 characters"),
    ],
)
def test_what_is_no_request_is_refused_with_why(tmp_path, content, message):
    put(tmp_path, content)
    with pytest.raises(PenstockError) as caught:
        read_request(tmp_path, 1)
    assert message in str(caught.value)


def test_links_and_pipes_are_not_read(tmp_path):
    put(tmp_path, {"weights": {"web": 1}})
    request_file(tmp_path, 2).symlink_to(request_file(tmp_path, 1))
    os.mkfifo(request_file(tmp_path, 3))
    request_file(tmp_path, 4).mkdir()
    for number, message in ((2, "cannot be read"), (3, "is not a file"), (4, "is not a file")):
        with pytest.raises(PenstockError, match=message):
            read_request(tmp_path, number)


def test_what_the_job_itself_fills_in_cannot_be_asked_for(tmp_path):
    put(tmp_path, {"extend": "web", "parts": 99, "number": 5})
    assert read_request(tmp_path, 1) == ControlRequest(number=1, extend="web")


def test_a_request_checks_itself_before_it_is_written():
    with pytest.raises(UsageError, match="exactly one of"):
        ControlRequest()


def test_a_job_is_running_while_it_holds_the_folder(tmp_path):
    assert not job_is_running(tmp_path)
    with exclusive(tmp_path, purpose="test"):
        assert job_is_running(tmp_path)
    assert not job_is_running(tmp_path)


def test_a_number_that_leaves_no_room_for_another_is_nobodys(tmp_path):
    put(tmp_path, {"stop": True}, number=999_999_999_999)
    assert submit(tmp_path, GOOD) == 1
    assert open_requests(tmp_path) == [1]


def test_an_answer_holds_the_weights_of_any_number_of_corpora(tmp_path):
    weights = {f"a corpus with a longish name, number {n}": 1 / 4000 for n in range(4000)}
    found = ControlReply(number=submit(tmp_path, GOOD), taken_up=True, said="so be it", weights=weights)
    answer(tmp_path, found)
    assert answers(tmp_path) == [found]
