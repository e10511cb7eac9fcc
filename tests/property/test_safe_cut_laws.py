"""A long text that is cut has the ids of the whole, for every normalizer, pre-tokenizer and model."""

import base64
import json
import zlib
from functools import cache
from itertools import product

import pytest
import tokenizers
from hypothesis import given, reject
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from penstock.core.errors import ModelError
from penstock.data.prepare.tokenize import _encode_pieces, pieces_of
from penstock.text.safe_cuts import WORD_PATTERNS
from penstock.text.tokenizer import Tokenizer
from tests.examples import examples

# Made by sentencepiece 0.2 from rules for U+0041, U+0039, U+00A0, U+3000, U+FB01, U+200B and pairs of them.
CHARSMAP = base64.b64encode(zlib.decompress(base64.b85decode(
    b"c-ke?d61WL7y$6+_bW4u`p;0(rA<2}QA#Bhg+YmwtHX9}hY6K*Q2lnT4xt0F7OkwKiw;Kz9k%J34yDrR+M2eR%9U>Pd3opk%"
    b"=3NbdA{>LGtazHF(PV3Tv9nA6_F{sEFJkd=_r(6DzCt%NJpOhV&~$z5qSl!+#<<N$K)}QJef?TbYyOgm{&#bMG@Z26$+PAl`"
    b"2%@N~&`eHK{@E|3`>AT#Zje7WKF$snx0w*<u6g(~xUv#C6=j^)#U|O}UYqXhsW~b2BY5dbFYqtuc1Ar5(3%JMFoXJGd+9X_1"
    b"P1#JlN82Rd;t_j4Z)(3!4u;UOO65gw)+kJ5wgJVsA?kwYJP(~rLNCzpW?;Bf{qIO!=#$CKg{4B;t;F_hsv%?O@h6eD?-(IhK"
    b"-j&Y17FIgbZlg|rSaZF%5lbFb4UgTw7VhXP?jj6oKbYAB*-e3lWyh#yn@eXe@lXrQKV%}#KA5g+ae8_A*W-fD>&pbZm6Be?7"
    b"#Vq1;KI2QiU@1#j&N9B{D^{|C)vThFZ`hQTiZ$Xo*0O>1Nv$9i8^z5@4_n#7HooOMwzHERe9tcSu$z7C<pBHnkstV(pD5!O4"
    b"snpf{F;-BBVu_{o0^KU@>CpiKAO}x&hPxjpZvjJoZu8EIm2nrahAV1&%gW=|NVTuB6nbv&W^JDqPPH_vy^8"
)))  # fmt: skip

NORMALIZERS = {
    "NFC": [normalizers.NFC()],
    "NFD": [normalizers.NFD()],
    "NFKC": [normalizers.NFKC()],
    "NFKD": [normalizers.NFKD()],
    "Lowercase": [normalizers.Lowercase()],
    "StripAccents": [normalizers.StripAccents()],
    "Nmt": [normalizers.Nmt()],
    "Precompiled": [normalizers.Precompiled(base64.b64decode(CHARSMAP))],
    "ByteLevel": [normalizers.ByteLevel()],
    "BertNormalizer": [
        normalizers.BertNormalizer(handle_chinese_chars=chinese, lowercase=lower)
        for chinese, lower in product((True, False), repeat=2)
    ],
    "Prepend": [normalizers.Prepend(text) for text in ("▁", " ", "ab ")],
    "Strip": [normalizers.Strip(left, right) for left, right in product((True, False), repeat=2)],
    "Replace": [
        normalizers.Replace(pattern, content)
        for pattern, content in (
            (" ", "▁"), (" ", "_"), ("▁", " "), ("a", "b "), ("a", ""), ("b", " "), ("a b", "q"), ("ab", ""),
            ("ab", " "), ("``", '"'), (Regex(" {2,}"), " "), (Regex(r"\s+"), " "), (Regex(r"\s+"), ""),
            (Regex(r"\s{2,}|[\n\r\t]"), " "), (Regex("b c"), "x"),
        )
    ],
}  # fmt: skip
BEHAVIORS = ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous")
PRE_TOKENIZERS = {
    "ByteLevel": [
        pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=words)
        for space, words in product((True, False), repeat=2)
    ],
    "Metaspace": [
        pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        for scheme, split in product(("always", "first", "never"), (True, False))
    ],
    "Split": [
        *(
            pre_tokenizers.Split(pattern, behavior, invert)
            for pattern, behavior, invert in product((" ", "a", "▁", "ab", "b c"), BEHAVIORS, (True, False))
        ),
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in sorted(WORD_PATTERNS)),
        *(pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior) for behavior in BEHAVIORS),
        pre_tokenizers.Split(Regex("[一-龥\u3040-\u309f\u30a0-\u30ff]+"), "isolated"),
        pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"),
    ],
    "Punctuation": [pre_tokenizers.Punctuation(behavior) for behavior in BEHAVIORS],
    "Digits": [pre_tokenizers.Digits(individual) for individual in (True, False)],
    "CharDelimiterSplit": [pre_tokenizers.CharDelimiterSplit(mark) for mark in " ab."],
    "FixedLength": [pre_tokenizers.FixedLength(3)],
    "UnicodeScripts": [pre_tokenizers.UnicodeScripts()],
    "Whitespace": [pre_tokenizers.Whitespace()],
    "WhitespaceSplit": [pre_tokenizers.WhitespaceSplit()],
    "BertPreTokenizer": [pre_tokenizers.BertPreTokenizer()],
}
MODELS = {
    "BPE": (lambda: models.BPE(unk_token="?"), trainers.BpeTrainer),
    "BPE of bytes": (
        lambda: models.BPE(unk_token="?", byte_fallback=True, fuse_unk=True),
        trainers.BpeTrainer,
    ),
    "BPE of words": (lambda: models.BPE(unk_token="?", ignore_merges=True), trainers.BpeTrainer),
    "Unigram": (models.Unigram, trainers.UnigramTrainer),
    "WordPiece": (lambda: models.WordPiece(unk_token="?"), trainers.WordPieceTrainer),
    "WordLevel": (lambda: models.WordLevel(unk_token="?"), trainers.WordLevelTrainer),
}
LETTERS = [*"abcxyzé", "Ab", "Ж", "ж ", "日本", "한국", "नमस्ते", "ﬁ", "İ", "Σ", "\u037a", "\u0d4e", "ab cd ef"]
SPACES = [*[" "] * 6, "  ", "\n", "\n\n", "\r\n", "\t", "\u3000", "\xa0", "▁", "Ġ"]
MARKS = [".", ",", "'s", "12", "9", "\u0301", "<t>", "``"]
TEXTS = st.lists(st.sampled_from([*LETTERS, *SPACES, *MARKS]), max_size=60).map("".join)
SAMPLE = ["ab cd ef abc xyz Ab é ж Σ 日本 한국 a b. c, 12 '' ab", "  ab\n cd\n\nef <t> ab▁cd b c"] * 3


def any_of(kinds):
    return st.one_of(*(st.sampled_from(some) for some in kinds.values()))


ADDED = st.lists(
    st.builds(
        AddedToken,
        st.sampled_from([" ", "  ", "\n", "<t>", "ab", "b c", " c", "z", "."]),
        normalized=st.booleans(),
        lstrip=st.sampled_from([False, False, False, True]),
        rstrip=st.sampled_from([False, False, False, True]),
        single_word=st.sampled_from([False, False, False, True]),
    ),
    max_size=2,
)


TRAINED_WITH = {
    "whole texts": None,
    "words": pre_tokenizers.Metaspace(),
    "bytes of words": pre_tokenizers.ByteLevel(add_prefix_space=False),
}


@cache
def model_of(name, trained_with):
    """Return the JSON of a small model."""
    model, trainer = MODELS[name]
    made = tokenizers.Tokenizer(model())
    if TRAINED_WITH[trained_with]:
        made.pre_tokenizer = TRAINED_WITH[trained_with]
    extra = {"unk_token": "?"} if trainer is trainers.UnigramTrainer else {}
    made.train_from_iterator(
        SAMPLE, trainer(vocab_size=90, special_tokens=["?"], show_progress=False, **extra)
    )
    return json.loads(made.to_str())


@st.composite
def made_tokenizers(draw):
    before = draw(st.lists(any_of(NORMALIZERS), max_size=3))
    words = draw(st.lists(any_of(PRE_TOKENIZERS), max_size=3))
    content = model_of(draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from(sorted(TRAINED_WITH))))
    return built(before, words, content, added=draw(st.one_of(st.just([]), ADDED)))


def built(before, words, content, added=()):
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.normalizer = normalizers.Sequence(before) if before else None
    made.pre_tokenizer = pre_tokenizers.Sequence(words) if words else None
    made.add_tokens(list(added))
    return Tokenizer(made.to_str().encode())


def joined(pieces, tokenizer):
    return [token for ids in _encode_pieces(pieces, tokenizer) for token in ids.tolist()]


@examples(300)
@given(made=made_tokenizers(), texts=st.lists(TEXTS, min_size=2, max_size=3), size=st.integers(1, 20))
def test_pieces_have_the_ids_of_the_whole(made, texts, size):
    for text in texts:
        pieces = pieces_of(text, made, size=size)
        assert "".join(piece for _, piece in pieces) == text
        if len(pieces) > 1:
            whole = whole_ids(text, made)
            assert joined(pieces, made) == whole


def whole_ids(text, tokenizer):
    """Return the ids of a text; the example is dropped where the library panics on it."""
    try:
        return tokenizer.encode(text)
    except ModelError:
        reject()


def test_every_normalizer_and_pre_tokenizer_of_the_library_is_tried():
    def names(module, base):
        return {
            name
            for name, kind in vars(module).items()
            if isinstance(kind, type) and issubclass(kind, base) and kind is not base
        }

    assert names(normalizers, normalizers.Normalizer) - {"Sequence"} == set(NORMALIZERS)
    assert names(pre_tokenizers, pre_tokenizers.PreTokenizer) - {"Sequence"} == set(PRE_TOKENIZERS)


N, P = normalizers, pre_tokenizers
BYTES = ("GPT-2", "RoBERTa", "StarCoder")
USUAL = {
    "GPT-2": ([], [P.ByteLevel(add_prefix_space=False)], "BPE"),
    "RoBERTa": ([], [P.ByteLevel(add_prefix_space=True)], "BPE"),
    "StarCoder": ([], [P.Digits(True), P.ByteLevel(add_prefix_space=False)], "BPE"),
    "Llama 2": ([N.Prepend("▁"), N.Replace(" ", "▁")], [], "BPE of bytes"),
    "Llama 2 by transformers": ([], [P.Metaspace(prepend_scheme="first", split=False)], "BPE of bytes"),
    "Gemma": ([N.Replace(" ", "▁")], [P.Split(" ", "merged_with_previous")], "BPE of bytes"),
    "BERT": ([N.BertNormalizer()], [P.BertPreTokenizer()], "WordPiece"),
    "T5": (
        [N.Precompiled(base64.b64decode(CHARSMAP))],
        [P.WhitespaceSplit(), P.Metaspace(prepend_scheme="always")],
        "Unigram",
    ),
    "ALBERT": (
        [N.Replace("``", '"'), N.NFKD(), N.StripAccents(), N.Lowercase(), N.Replace(Regex(" {2,}"), " ")],
        [P.WhitespaceSplit(), P.Metaspace()],
        "Unigram",
    ),
    **{
        f"pattern {index}": (
            [N.NFC()],
            [P.Split(Regex(pattern), "isolated"), P.ByteLevel(add_prefix_space=False, use_regex=False)],
            "BPE of words",
        )
        for index, pattern in enumerate(sorted(WORD_PATTERNS))
    },
}


@pytest.mark.parametrize("kind", USUAL)
def test_usual_tokenizers_cut_prose_with_the_ids_of_the_whole(kind):
    before, words, model = USUAL[kind]
    made = built(
        before, words, model_of(model, "bytes of words" if "pattern" in kind or kind in BYTES else "words")
    )
    text = "ab cd, ef abc.\n\nxyz Ab é ж  日本 12 ab cd ef " * 20
    pieces = pieces_of(text, made, size=30)
    assert len(pieces) > 10, "long texts are encoded in pieces"
    assert joined(pieces, made) == made.encode(text)


@pytest.mark.parametrize(
    "rule", [P.FixedLength(3), P.UnicodeScripts(), P.Split(Regex(r"\w+ \w+"), "isolated")]
)
def test_a_rule_whose_splits_depend_on_what_is_far_away_leaves_no_cut(rule):
    made = built([], [rule], model_of("BPE", "words"))
    assert made.safe_cuts is None


def test_a_merge_across_a_space_leaves_no_cut_there():
    content = json.loads(built([N.Replace(" ", "▁")], [], model_of("BPE", "words")).content)
    content["model"] |= {"vocab": {"?": 0, "a": 1, "b": 2, "▁": 3, "a▁": 4}, "merges": [["a", "▁"]]}
    made = Tokenizer(json.dumps(content).encode())
    assert [piece for _, piece in pieces_of("a a b a b b", made, size=1)] == ["a a b", " a b", " b"]


@pytest.mark.parametrize("name", ["ab", "b c", "b▁c", "▁cd", " cd", "d"])
@pytest.mark.parametrize("options", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}])
@pytest.mark.parametrize("normalized", [True, False])
def test_added_tokens_beside_or_across_a_cut_are_those_of_the_whole(name, options, normalized):
    token = AddedToken(name, normalized=normalized, **options)
    before, words, model = USUAL["Llama 2"]
    made = built(before, words, model_of(model, "words"), added=[token])
    text = "xy ab cd ef xy ab cd " * 5
    assert joined(pieces_of(text, made, size=2), made) == made.encode(text)
