"""Model folders of someone who wishes us ill: refused in words, soon, and none of their code runs."""

import json
import pickle
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import save_tiny_model

from penstock.core.errors import PenstockError
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.text.tokenizer import train_tokenizer

ENGINE = EngineConfig(device="cpu", cache_gib=0.01)
RAN = []


class Payload:
    def __reduce__(self):
        return (RAN.append, ("it ran",))


@pytest.fixture
def folder(tmp_path):
    save_tiny_model("llama", tmp_path / "model")
    train_tokenizer(["the penstock feeds"] * 9, vocab_size=211 + 60).save(
        tmp_path / "model" / "tokenizer.json"
    )
    return tmp_path / "model"


def refusal(folder):
    with pytest.raises(PenstockError) as error:
        LLM(folder, ENGINE).close()
    assert RAN == []
    return str(error.value)


def with_header(folder, header, *, length=None, data=b"\0" * 64):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({}, 2**63),
        ({}, 2**40),
        ({}, 10**6),
        (b"not JSON", None),
        (b"[" * 100_000, None),
        ({"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 2**62]}}, None),
        ({"model.norm.weight": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 64]}}, None),
        ({"model.norm.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [64, 0]}}, None),
        ({"model.norm.weight": {"dtype": "PICKLE", "shape": [16], "data_offsets": [0, 64]}}, None),
    ],
    ids=["2**63", "2**40", "beyond", "text", "deep", "offsets", "shape", "negative", "type"],
)
def test_headers_that_lie_are_damage(folder, header, length):
    with_header(folder, header, length=length)
    assert "model.safetensors is damaged" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_opened(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload()))
    assert "opening a pickle can run code" in refusal(folder)


def test_a_pickle_under_another_name_is_damage(folder):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload()) * 10)
    assert "damaged" in refusal(folder)


def test_code_in_a_folder_is_not_imported(folder):
    raw = json.loads((folder / "config.json").read_text())
    raw["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "modeling_evil.py").write_text("raise SystemExit('it ran')")
    assert "does not read: auto_map" in refusal(folder)
    LLM(folder, replace(ENGINE, ignored_keys=("auto_map",))).close()


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": 10**9, "head_dim": 8},
        {"intermediate_size": -5},
        {"max_position_embeddings": 10**15},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": "x" * 10_000},
        {"num_hidden_layers": [2]},
    ],
    ids=lambda change: "-".join(change),
)
def test_sizes_that_no_model_has_are_refused_before_they_are_made(folder, change):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))
    assert refusal(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"[" * 100_000, b"", b"null"], ids=["bytes", "deep", "", "null"]
)
def test_files_that_are_no_json_are_named(folder, name, content):
    (folder / name).write_bytes(content)
    assert name in refusal(folder)


def test_a_link_to_another_file_is_no_way_out(folder, tmp_path):
    (tmp_path / "secret").write_text("do not tell")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "secret")
    assert "do not tell" not in refusal(folder)


def test_weights_that_are_no_numbers_fail_their_answers_and_nothing_else(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with LLM(folder, ENGINE) as llm:
        for _ in range(2):
            with pytest.raises(PenstockError, match="not finite"):
                llm.generate([[1, 2, 3]])
        assert llm.thread.stats().used_blocks == 0
