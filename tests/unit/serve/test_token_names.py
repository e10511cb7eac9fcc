"""Names of tokens in log-probabilities."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from penstock.engine.request import TokenLogprob
from penstock.serve.token_strings import Offsets, TokenNames
from penstock.text.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture
def sentencepiece():
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "the", "\u2581the"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    plain = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    plain.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    plain.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(plain.to_str().encode())


def entry(tokenizer, token):
    logprob = TokenLogprob(token=token, logprob=-1.0, rank=1, top={})
    [found] = TokenNames(tokenizer).for_chat([logprob]).content
    return found.token, found.bytes


def test_a_word_of_sentencepiece_keeps_the_space_before_it(sentencepiece):
    token = sentencepiece.vocabulary()["\u2581the"]
    assert entry(sentencepiece, token) == (" the", list(b" the"))


def test_parts_of_a_character_have_their_bytes(sentencepiece):
    assert entry(sentencepiece, sentencepiece.vocabulary()["<0xE6>"]) == ("\ufffd", [0xE6])
    trained = train_tokenizer(["the"], vocab_size=257)
    parts = [entry(trained, token) for token in trained.encode("\u6c34")]
    assert bytes(byte for _, part in parts for byte in part).decode() == "\u6c34"
    assert {name for name, _ in parts} == {"\ufffd"}


def test_special_tokens_have_their_names(sentencepiece):
    assert entry(sentencepiece, sentencepiece.vocabulary()["</s>"]) == ("</s>", list(b"</s>"))


def test_tokens_begin_where_the_text_has_them_after_characters_of_several_tokens():
    tokenizer = train_tokenizer(["the water"] * 9, vocab_size=300)
    names, offsets, text = TokenNames(tokenizer), Offsets(), "the \u6c34 \U0001f600 water"
    token_ids = [*tokenizer.encode(text), tokenizer.eos_id]
    logprobs = [TokenLogprob(token=token, logprob=-1.0, rank=1, top={}) for token in token_ids]
    found = names.for_completion(token_ids[:3], logprobs[:3], offsets=offsets)
    rest = names.for_completion(token_ids[3:], logprobs[3:], offsets=offsets)
    begins = list(zip(found.tokens + rest.tokens, found.text_offset + rest.text_offset, strict=True))
    assert [at for name, at in begins if name == "\ufffd"] == [4] * 3 + [6] * 4
    assert all(text[at:].startswith(name) for name, at in begins[:-1] if name != "\ufffd")
    assert begins[-1] == ("<|endoftext|>", len(text))


def test_a_character_that_is_not_ended_is_one():
    offsets = Offsets()
    assert [offsets.push(written) for written in (b"\xe6", b"a", b"", b"b")] == [0, 1, 2, 2]


def test_a_prompts_tokens_have_their_rank_and_the_likeliest_theirs():
    names = TokenNames(train_tokenizer(["penstock"] * 3, vocab_size=260))
    one = TokenLogprob(token=5, logprob=-3.0, rank=9, top={7: -0.5, 8: float("-inf")})
    first, second = names.for_prompt([None, one])
    assert first is None
    assert {token: (entry.logprob, entry.rank) for token, entry in second.items()} == {
        5: (-3.0, 9),
        7: (-0.5, 1),
        8: (-9999.0, 2),
    }
    assert second[7].decoded_token == names.name(7)


def test_tokens_can_be_named_by_their_ids():
    names = TokenNames(train_tokenizer(["penstock"] * 3, vocab_size=260))
    one = TokenLogprob(token=5, logprob=-3.0, rank=2, top={7: -0.5})
    entry = names.for_chat([one], as_ids=True).content[0]
    assert (entry.token, entry.top_logprobs[0].token, entry.bytes) == (
        "token_id:5",
        "token_id:7",
        [*names.written(5)],
    )
    told = names.for_completion([5], [one], offsets=Offsets(), as_ids=True)
    assert (told.tokens, told.top_logprobs) == (["token_id:5"], [{"token_id:5": -3.0, "token_id:7": -0.5}])
