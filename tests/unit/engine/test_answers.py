"""What ends an answer, with several tokens in one step and text that is held back."""

import pytest

from penstock.engine.detokenizer import TextStream
from penstock.engine.outputs import SampledTokens, SequenceOutput
from penstock.engine.request import Request, TokenLogprob
from penstock.engine.sampling_params import Sampling
from penstock.engine.scheduling.sequence import Sequence


def an_answer(*, max_tokens=8, min_tokens=0, stop_ids=(), stop_texts=()):
    request = Request(
        prompt=(1,),
        max_tokens=max_tokens,
        sampling=Sampling(min_tokens=min_tokens),
        stop_ids=frozenset(stop_ids),
        stop_texts=stop_texts,
    )
    sequence = Sequence(id=3, request_id=2, answer=1, request=request, tokens=[1], num_cached=5)
    stream = TextStream(lambda ids: "".join(map(chr, ids)), stop_texts=stop_texts)
    return SequenceOutput(sequence, stream)


def take(answer, text):
    piece = answer.take(SampledTokens(tokens=tuple(map(ord, text))))
    return piece.text, len(piece.token_ids), piece.finish


def test_a_piece_says_whose_it_is_and_the_last_how_much_was_found():
    answer = an_answer(max_tokens=2)
    first, last = answer.take(SampledTokens(tokens=(65,))), answer.take(SampledTokens(tokens=(66,)))
    assert (first.request_id, first.answer, first.finish, first.num_cached) == (2, 1, None, 0)
    assert (last.finish, last.num_cached) == ("length", 5)


@pytest.mark.parametrize(
    ("drawn", "told"),
    [
        ("ab", ("ab", 2, None)),
        ("abXcd", ("ab", 2, "stop")),  # drafts that stood behind an end token are no part of the answer
        ("abcdefgh", ("abcdefgh", 8, "length")),
        ("abcdefghij", ("abcdefgh", 8, "length")),
        ("abcdefgX", ("abcdefg", 7, "stop")),
        ("X", ("", 0, "stop")),
    ],
)
def test_an_answer_ends_where_it_ends_whatever_comes_with_it(drawn, told):
    assert take(an_answer(stop_ids=[ord("X")]), drawn) == told


def test_text_that_could_begin_a_stop_text_is_held_back_until_it_does_not():
    answer = an_answer(stop_texts=("xyz",))
    assert take(answer, "axy") == ("a", 3, None)
    assert take(answer, "b") == ("xyb", 1, None)
    assert take(answer, "xyzc") == ("", 3, "stop")


def test_what_was_held_back_comes_with_the_end():
    answer = an_answer(max_tokens=3, stop_texts=("xyz",))
    assert take(answer, "axy") == ("axy", 3, "length")
    cancelled = an_answer(stop_texts=("xyz",))
    take(cancelled, "ax")
    assert cancelled.end("cancelled").text == "x"


def test_no_end_counts_before_the_least_number_of_tokens():
    answer = an_answer(min_tokens=4, stop_ids=[ord("X")], stop_texts=("ab",))
    assert take(answer, "ab") == ("ab", 2, None)
    assert take(answer, "X") == ("X", 1, None)
    assert take(answer, "abX") == ("", 2, "stop")


def test_logprobs_are_those_of_the_tokens_that_are_told():
    answer = an_answer(stop_ids=[ord("X")])
    logprobs = tuple(TokenLogprob(token=t, logprob=-1.0, rank=1, top={}) for t in map(ord, "aXb"))
    assert (
        answer.take(SampledTokens(tokens=tuple(map(ord, "aXb")), logprobs=logprobs)).logprobs == logprobs[:1]
    )


def test_an_error_and_a_vector_end_an_answer():
    failed = an_answer().take(SampledTokens(error="no numbers"))
    assert (failed.finish, failed.error) == ("error", "no numbers")
    refused = an_answer().take(SampledTokens(error="too large", is_refused=True))
    assert (refused.finish, refused.error) == ("refused", "too large")
    found = an_answer().take(SampledTokens(embedding=(0.6, 0.8)))
    assert (found.finish, found.embedding) == ("stop", (0.6, 0.8))
    assert an_answer().take(SampledTokens()) is None
