"""Bodies that are no Unicode text."""

import json

import pytest

from penstock.serve.errors import ApiError
from penstock.serve.request_body import check_unicode

HALF = '{"a": "\\ud83d"}'


@pytest.mark.parametrize(
    "body",
    [
        HALF.encode(),
        HALF.upper().replace("U", "u").encode(),
        HALF.encode("utf-16"),
        b'{"a": "\xed\xa0\x80"}',
        '{"a": "\ud83d"}'.encode("utf-16", "surrogatepass"),
        b'{"\\udc00": 1}',
        b'["\\ud83d\\ud83d\\ude00"]',
    ],
)
def test_halves_of_surrogate_pairs_are_refused_however_they_are_written(body):
    with pytest.raises(ApiError, match="is half of a pair") as refused:
        check_unicode(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"a": "größer 😀"}).encode(),
        json.dumps({"a": "größer 😀"}, ensure_ascii=False).encode(),
        '{"a": "größer 😀"}'.encode("utf-16"),
        b'["\\\\ud83d"]',  # a backslash, and letters
        b'{"a": "\\ud83d',  # no JSON, which others say
        b"\xff\xfe",
        b"",
    ],
)
def test_whole_characters_and_what_is_no_json_pass(body):
    check_unicode(body)
