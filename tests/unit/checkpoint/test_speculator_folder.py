"""Folders of speculators: what is written is read, and what others publish too."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.speculator import is_speculator, load_speculator, save_speculator
from penstock.core.errors import ModelError, UsageError
from penstock.models.speculator import Speculator, SpeculatorConfig


def drawn(*, tie_weights=True):
    sizes = SpeculatorConfig(vocab_size=11, emb_dim=6, inner_dim=8, n_predict=3, tie_weights=tie_weights)
    speculator = Speculator(sizes)
    speculator.initialise(seed=0)
    return speculator


def guesses(speculator):
    with torch.no_grad():
        hidden = torch.arange(30.0).view(5, 6).sin().to(next(speculator.parameters()).dtype)
        return speculator.guesses(hidden, torch.arange(5), num=3).tolist()


@pytest.mark.parametrize("tie_weights", [False, True])
def test_what_is_written_is_read(tmp_path, tie_weights):
    speculator = drawn(tie_weights=tie_weights)
    save_speculator(speculator, tmp_path / "heads", extra_files={"note.json": "{}"})
    read = load_speculator(tmp_path / "heads")
    assert read.config == speculator.config
    assert guesses(read) == guesses(speculator)
    assert is_speculator(tmp_path / "heads")
    assert (tmp_path / "heads" / "note.json").is_file()
    assert len({id(p) for p in read.parameters()}) == len(list(speculator.parameters()))


def test_names_are_those_that_ibm_publishes(tmp_path):
    save_speculator(drawn(), tmp_path / "heads")
    assert set(load_file(tmp_path / "heads" / "model.safetensors")) == {
        "speculator.proj.0.weight",
        "speculator.proj.1.weight",
        "speculator.emb.0.weight",
        "speculator.ln.0.weight",
        "speculator.ln.0.bias",
        "speculator.head.0.weight",
    }


def test_shared_tensors_that_were_stored_often_are_read_once(tmp_path):
    save_speculator(drawn(), tmp_path / "heads")
    file = tmp_path / "heads" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "speculator.emb.2.weight": tensors["speculator.emb.0.weight"].clone()}, file)
    assert guesses(load_speculator(tmp_path / "heads")) == guesses(drawn())


def test_weights_of_other_sizes_are_refused(tmp_path):
    save_speculator(drawn(), tmp_path / "heads")
    config = tmp_path / "heads" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 12}))
    with pytest.raises(ModelError, match="has shape"):
        load_speculator(tmp_path / "heads")


def test_a_folder_in_use_is_not_written_over(tmp_path):
    save_speculator(drawn(), tmp_path / "heads")
    with pytest.raises(UsageError, match="already exists"):
        save_speculator(drawn(), tmp_path / "heads")
    assert not is_speculator(tmp_path)
