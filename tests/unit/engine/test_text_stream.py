"""Streamed text: whole characters, nothing lost, nothing from a stop text on."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from penstock.engine.detokenizer import TextStream
from penstock.text.tokenizer import train_tokenizer

BYTES = train_tokenizer(["grün, naïve"] * 5, vocab_size=280)
MARKS = BYTES.encode("😀") + BYTES.encode("€")  # half characters, where they come alone
# as in Llama 2: spaces are underscores, and the first of a text is dropped when decoding
PIECES = tokenizers.Tokenizer(models.WordLevel({"▁the": 0, "▁pen": 1, "stock": 2, "▁": 3}, unk_token="▁the"))
PIECES.add_special_tokens(["</s>"])
END = 4
PIECES.decoder = decoders.Metaspace()


def streamed(tokens, decode, **options):
    stream = TextStream(decode, **options)
    return [*(stream.push(token) for token in tokens), stream.close()]


@given(st.text())
def test_pieces_join_to_the_text(text):
    tokens = BYTES.encode(text)
    assert "".join(streamed(tokens, BYTES.decode)) == text


@given(st.lists(st.integers(min_value=1, max_value=279), max_size=40))
def test_pieces_of_bytes_that_are_no_text_join_to_what_decoding_gives(tokens):
    assert "".join(streamed(tokens, BYTES.decode)) == BYTES.decode(tokens)


@given(st.lists(st.sampled_from([*MARKS, *BYTES.encode("日a")]), max_size=60))
def test_pieces_of_many_bytes_that_are_no_text_join_likewise(tokens):
    assert "".join(streamed(tokens, BYTES.decode)) == BYTES.decode(tokens)


def test_bytes_that_never_become_text_are_told_meanwhile_and_decoded_in_short_runs():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return BYTES.decode(ids)

    pieces = streamed([MARKS[0]] * 500, decode)
    assert "".join(pieces) == "\ufffd" * 500
    assert len([piece for piece in pieces if piece]) > 50
    assert longest < 40


def test_no_piece_has_half_a_character():
    pieces = streamed(BYTES.encode("日本 😀 größer"), BYTES.decode)
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 5


def test_spaces_between_words_survive_a_decoder_that_drops_the_first():
    assert "".join(streamed([0, 1, 2, 0], PIECES.decode)) == PIECES.decode([0, 1, 2, 0]) == "the penstock the"
    assert "".join(streamed([0, END, 0], PIECES.decode)) == "the the"


@given(st.lists(st.integers(0, 4), max_size=7))
def test_control_tokens_between_words_take_no_space_with_them(tokens):
    assert "".join(streamed(tokens, PIECES.decode)) == PIECES.decode(tokens)


@given(st.text(alphabet="ab\n:U", max_size=30), st.sampled_from(["\nU:", "ab", "aab", ":"]))
def test_the_text_ends_before_the_first_stop_text(text, stop):
    pieces = streamed(BYTES.encode(text), BYTES.decode, stop_texts=[stop, "never in it"])
    assert "".join(pieces) == text.split(stop)[0]


@pytest.mark.parametrize("end", ["", "\nUs"])
def test_what_only_began_like_a_stop_text_is_given_back_at_the_end(end):
    assert "".join(streamed(BYTES.encode(f"and{end}"), BYTES.decode, stop_texts=["\nUser:"])) == f"and{end}"


@pytest.mark.parametrize(
    ("stop_texts", "text"), [((), "the</s> pen"), (("</s>", "zz"), "the"), (("> p",), "the</s")]
)
def test_special_tokens_that_are_shown_are_text_where_they_stand(stop_texts, text):
    def decode(ids):
        return PIECES.decode(list(ids))

    assert "".join(streamed([0, END, 1], decode)) == "the pen"
    assert "".join(streamed([0, END, 1], decode, shown={END: "</s>"}, stop_texts=stop_texts)) == text


def test_a_shown_token_ends_what_was_half_a_character():
    first, *_ = BYTES.encode("😀")
    assert "".join(streamed([first, 0], BYTES.decode, shown={0: "<end>"})) == "�<end>"
