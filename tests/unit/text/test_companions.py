"""Files beside a tokenizer, and tokenizers that extend others."""

import json

import pytest
import tokenizers

from penstock.core.errors import InputError
from penstock.text.companions import companions_of, end_ids
from penstock.text.tokenizer import Tokenizer, train_tokenizer


def write(folder, **files):
    folder.mkdir()
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_each_file_is_of_the_first_folder_that_has_it(tmp_path):
    first = write(tmp_path / "a", chat_template__jinja="of a", README__md="no companion")
    second = write(tmp_path / "b", chat_template__jinja="of b", tokenizer_config__json={"bos_token": "x"})
    assert companions_of([first, second]) == {
        "chat_template.jinja": "of a",
        "tokenizer_config.json": '{"bos_token": "x"}',
    }


def test_end_tokens_that_only_a_models_config_names_are_kept(tmp_path):
    model = write(tmp_path / "a", config__json={"eos_token_id": [3, 5]}, generation_config__json={"top_k": 4})
    files = companions_of([model])
    assert json.loads(files["generation_config.json"]) == {"top_k": 4, "eos_token_id": [3, 5]}
    assert end_ids(files) == [3, 5]
    own = write(tmp_path / "b", config__json={"eos_token_id": 3}, generation_config__json={"eos_token_id": 7})
    assert end_ids(companions_of([own])) == 7
    assert end_ids(companions_of([write(tmp_path / "c", config__json={"run": {}})])) is None
    part = {"text_config": {"eos_token_id": [1, 106]}}
    assert end_ids(companions_of([write(tmp_path / "d", config__json=part)])) == [1, 106]
    both = {**part, "eos_token_id": 1}
    assert end_ids(companions_of([write(tmp_path / "e", config__json=both)])) == 1


def test_a_damaged_companion_is_named(tmp_path):
    with pytest.raises(InputError, match=r"generation_config\.json is not valid JSON.*Restore it"):
        companions_of([write(tmp_path / "a", generation_config__json="{")])


@pytest.fixture(scope="module")
def plain():
    return train_tokenizer(["the penstock feeds the turbine"] * 9, vocab_size=300)


def grown(tokenizer, *names):
    parsed = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    parsed.add_special_tokens(list(names))
    return Tokenizer(parsed.to_str().encode())


def test_a_tokenizer_with_added_tokens_extends_the_plain_one_and_not_the_reverse(plain):
    more = grown(plain, "<|im_start|>", "<|im_end|>")
    assert more.extends(plain)
    assert not plain.extends(more)
    assert plain.extends(plain)


def test_the_form_of_the_file_is_of_no_matter_but_ids_and_rules_are(plain):
    raw = json.loads(plain.content)
    assert Tokenizer(json.dumps(raw, indent=3).encode()).extends(plain)
    assert not grown(plain, "<a>", "<b>").extends(grown(plain, "<b>", "<a>"))
    other = json.dumps({**raw, "pre_tokenizer": {"type": "Whitespace"}}).encode()
    assert not Tokenizer(other).extends(plain)
    assert not train_tokenizer(["another text of words"] * 9, vocab_size=300).extends(plain)


def test_two_chat_templates_are_of_one_folder(tmp_path):
    first = write(tmp_path / "a", chat_template__jinja="of a")
    second = write(tmp_path / "b", chat_template__jinja="of b")
    tools = "additional_chat_templates/tool_use.jinja"
    (second / tools).parent.mkdir()
    (second / tools).write_text("tools of b")
    assert companions_of([first, second]) == {"chat_template.jinja": "of a"}
    assert companions_of([second, first]) == {"chat_template.jinja": "of b", tools: "tools of b"}
