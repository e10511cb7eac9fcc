"""Bytes of text per token: they add up to the text, whatever the kind of vocabulary."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from penstock.text.token_bytes import spellings, token_bytes
from penstock.text.tokenizer import Tokenizer, train_tokenizer

TEXTS = ["the penstock feeds the turbine", "größer — 水 \U0001f30a\n\t", "  two  spaces ", "<|endoftext|>"]


def sizes_of(tokenizer, text):
    table = token_bytes(tokenizer)
    assert table is not None
    return table[tokenizer.encode(text)]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_byte_level_vocabulary_add_up_to_the_bytes_of_the_text(text):
    tokenizer = train_tokenizer(TEXTS * 5, vocab_size=300)
    sizes = sizes_of(tokenizer, text)
    assert sizes.sum() == len(text.encode())
    assert (sizes > 0).all()
    assert b"".join(spellings(tokenizer)[token] for token in tokenizer.encode(text)) == text.encode()


def test_control_tokens_are_no_text():
    tokenizer = train_tokenizer(TEXTS, vocab_size=260)
    table = token_bytes(tokenizer)
    assert len(table) == tokenizer.vocab_size
    assert table[tokenizer.eos_id] == 0
    assert np.count_nonzero(table == 0) == 1


@pytest.mark.parametrize("text", ["the turbine", "größer 水\n"])
def test_the_tokens_of_sentencepiece_add_up_to_the_bytes_of_the_text_and_its_leading_space(text):
    """As Llama 2 writes them: a space before the text, U+2581 for spaces, and lone bytes for rare letters."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "the", "t", "u", "ö"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    plain = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    plain.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    plain.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    plain.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(plain.to_str().encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert sizes_of(tokenizer, text).sum() == len(f" {text}".encode())
    spelled = spellings(tokenizer)
    assert b"".join(spelled[token] for token in tokenizer.encode(text)) == f" {text}".encode()


def test_an_added_word_counts_as_it_is_written():
    plain = tokenizers.Tokenizer.from_str(train_tokenizer(TEXTS, vocab_size=260).content.decode())
    plain.add_tokens(["größer"])
    tokenizer = Tokenizer(plain.to_str().encode())
    assert sizes_of(tokenizer, "größer").tolist() == [8]


def test_a_vocabulary_of_words_does_not_say_its_bytes():
    plain = tokenizers.Tokenizer(models.WordLevel({"the": 0, "turbine": 1, "<unk>": 2}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    assert token_bytes(Tokenizer(plain.to_str().encode())) is None
