"""What of a conversation is refused before its template is asked."""

from types import SimpleNamespace

import pytest

from penstock.serve.chat_request import chat_request
from penstock.serve.errors import ApiError
from penstock.serve.schema.chat import ChatRequest
from penstock.serve.tool_choice import ToolUse
from penstock.text.chat import ChatTemplate


def test_an_effort_that_the_template_does_not_know_is_refused():
    service = SimpleNamespace(served=SimpleNamespace(words=SimpleNamespace(template=ChatTemplate())))
    body = ChatRequest(messages=[{"role": "user", "content": "a"}], reasoning_effort="low")
    with pytest.raises(ApiError, match="knows no reasoning_effort") as refused:
        chat_request(body, ToolUse(), service, client="a")
    assert (refused.value.status, refused.value.param) == (400, "reasoning_effort")
