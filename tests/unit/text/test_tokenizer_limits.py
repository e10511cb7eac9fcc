"""How much text a token can hold, and tokenizers that fail."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_models import TEXT, panicking
from tokenizers import decoders, models, normalizers, pre_tokenizers

from penstock.core.errors import ModelError
from penstock.text.tokenizer import Tokenizer, train_tokenizer

PLAIN = train_tokenizer([TEXT] * 9, vocab_size=400)


def byte_level(normalizer=None, *added):
    parsed = tokenizers.Tokenizer.from_str(PLAIN.content.decode())
    if normalizer is not None:
        parsed.normalizer = normalizer
    parsed.add_tokens(list(added))
    return Tokenizer(parsed.to_str().encode())


def sentencepiece(*, byte_fallback=True):
    vocab = {
        "<unk>": 0,
        **{f"<0x{i:02X}>": i + 1 for i in range(256)},
        "\u2581": 257,
        "e": 258,
        "\u2581e": 259,
    }
    model = models.BPE(vocab=vocab, merges=[("\u2581", "e")], byte_fallback=byte_fallback, unk_token="<unk>")
    parsed = tokenizers.Tokenizer(model)
    parsed.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    parsed.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    return Tokenizer(parsed.to_str().encode())


BOUNDED = {
    "bytes": byte_level(),
    "nfc": byte_level(normalizers.NFC()),
    "nfkc": byte_level(normalizers.NFKC()),
    "with a long added token": byte_level(None, "\u00e9" * 40),
    "sentencepiece": sentencepiece(),
}


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=st.text(st.sampled_from("eth  \u00e9\u0301\U0001d400\uff76\u3099\u1f82\u6c34\n"), max_size=60))
def test_no_token_holds_more_bytes_than_is_said(kind, text):
    tokenizer = BOUNDED[kind]
    assert not tokenizer.exceeds(text, len(tokenizer.encode(text)))


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_text_that_no_tokens_hold_is_known_to_be_too_long(kind):
    tokenizer = BOUNDED[kind]
    most = tokenizer.longest_token_bytes * 7
    assert tokenizer.exceeds("a" * (most + 1), 7)
    assert not tokenizer.exceeds("a" * most, 7)


def test_letters_that_become_shorter_are_counted_so():
    text = "\U0001d400" * 100  # of four bytes each, which become one
    assert BOUNDED["nfkc"].exceeds(text, 100 // BOUNDED["nfkc"].longest_token_bytes - 1)
    assert not BOUNDED["nfkc"].exceeds(text, 100 // BOUNDED["nfkc"].longest_token_bytes + 1)
    assert BOUNDED["bytes"].exceeds(text, 100 // BOUNDED["bytes"].longest_token_bytes + 1)


def test_the_file_is_parsed_once_however_many_texts_are_asked_about(monkeypatch):
    tokenizer, parsed = byte_level(normalizers.NFC()), []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    assert tokenizer.exceeds("a" * 10_000, 7)
    before = len(parsed)
    assert all(tokenizer.exceeds("a" * 10_000, most) for most in range(1, 9))
    assert len(parsed) == before


def words():
    parsed = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    parsed.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(parsed.to_str().encode())


@pytest.mark.parametrize(
    "tokenizer",
    [
        words(),
        sentencepiece(byte_fallback=False),
        byte_level(normalizers.Strip()),
        byte_level(None, tokenizers.AddedToken("<x>", rstrip=True)),
    ],
    ids=["whole words", "unknown letters", "strips", "takes the spaces beside it"],
)
def test_where_a_token_may_hold_anything_no_length_is_said(tokenizer):
    assert tokenizer.longest_token_bytes is None


@pytest.mark.parametrize("text", ["\u00e9", "a" * 2000 + "\u00e9"])
@pytest.mark.parametrize("special", [False, True])
def test_a_tokenizer_that_panics_is_an_error_of_the_model(text, special):
    tokenizer = Tokenizer(panicking(PLAIN.content))
    assert tokenizer.encode("plain") == PLAIN.encode("plain")
    with pytest.raises(ModelError, match=r"tokenizer fails on this text \(index out of bounds"):
        tokenizer.encode(text, special=special)


def test_a_damaged_file_is_no_panic():
    assert json.loads(panicking(PLAIN.content))["normalizer"]["type"] == "Precompiled"
