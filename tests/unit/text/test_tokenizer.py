"""Tokenizers: exact round trips, control tokens out of reach of text, clear errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.errors import InputError, UsageError
from penstock.text import tokenizer as module
from penstock.text.tokenizer import EOS, Tokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat\n", "the dog sat on the log\n\n", "def f(x):\n    return x + 1\n"] * 4


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=300)


@pytest.mark.parametrize("text", ["", " ", "the cat", "naïve 日本語 🙂\r\n\t\x00", "  two  spaces ", EOS])
def test_decoding_restores_any_text(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_the_end_token_is_id_zero_and_ids_stay_below_the_vocabulary_size(trained: Tokenizer) -> None:
    assert trained.eos_id == 0
    assert 257 < trained.vocab_size <= 300
    assert max(trained.encode("".join(TEXTS))) < trained.vocab_size


def test_the_end_token_written_in_a_text_is_only_characters(trained: Tokenizer) -> None:
    assert 0 not in trained.encode(f"a{EOS}b")
    assert trained.encode(f"a{EOS}b", special=True)[1] == 0
    assert 0 not in trained.encode(f"a{EOS}b"), "asking for special tokens must not change the tokenizer"


def test_a_batch_equals_its_texts_one_by_one(trained: Tokenizer) -> None:
    assert [ids.tolist() for ids in trained.encode_batch(TEXTS)] == [trained.encode(text) for text in TEXTS]


def test_training_in_two_processes_gives_the_same_bytes(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from penstock.text.tokenizer import train_tokenizer\n"
        "texts = [f'word{i % 97} and {i * i} naïve\\n' for i in range(3000)]\n"
        "train_tokenizer(texts, vocab_size=700).save(Path(sys.argv[1]))"
    )
    for name in ("a", "b"):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / name)], check=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saving_and_loading_keeps_the_fingerprint(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint == trained.fingerprint
    assert Tokenizer.load(str(tmp_path / "tokenizer.json")).fingerprint == trained.fingerprint


def test_a_stored_truncation_rule_does_not_drop_tokens(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    text = "the cat sat on the mat " * 10
    assert Tokenizer(json.dumps(content).encode()).encode(text) == trained.encode(text)


def test_an_end_token_of_another_name_is_found(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    renamed = (tmp_path / "tokenizer.json").read_text().replace(EOS, "</s>")
    assert Tokenizer(renamed.encode()).eos_id == 0
    assert Tokenizer(renamed.replace("</s>", "<nothing>").encode()).eos_id is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model":{"type":"BPE"}}']
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InputError, match=r"t\.json: Not a tokenizer .*Give the tokenizer\.json"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json does not exist"):
        Tokenizer.load(tmp_path / "absent.json")


def test_an_oversized_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    (tmp_path / "t.json").write_text("x" * 11)
    with pytest.raises(InputError, match=r"has 11 B; a tokenizer has at most 10 B"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_token_id_beyond_all_vocabularies_is_refused(trained: Tokenizer) -> None:
    content = json.loads(trained.content)
    content["model"]["vocab"]["damaged"] = 4_000_000_000
    with pytest.raises(InputError, match=r"a token id above 16,777,216: 4,000,000,000"):
        Tokenizer(json.dumps(content).encode())


def test_a_vocabulary_below_257_is_refused() -> None:
    with pytest.raises(UsageError, match=r"too small \(got 256\).*at least 257"):
        train_tokenizer(TEXTS, vocab_size=256)
