"""What the training figures of the GPU kit rest on: layers that fit, bytes, medians, the corpus it writes."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.training import (
    SHAPES,
    layers_that_fit,
    mean_of,
    needed_bytes,
    recipe_of,
    step_tokens,
    write_megatron,
)

from penstock.data import Loader
from penstock.parallel.layout import RankLayout
from penstock.train.planning.memory import memory_plan


@pytest.mark.parametrize(("free", "layers"), [(None, 9), (100, 9), (99, 8), (20, 1), (19, 0)])
def test_as_many_layers_are_taken_as_fit(free, layers):
    assert layers_that_fit(9, lambda n: 10 + 10 * n, free) == layers


def test_needed_bytes_grow_with_layers_and_hold_the_plain_loops_logits(tmp_path):
    def recipe(layers, rows):
        model = {**SHAPES["8b"], "num_hidden_layers": layers}
        return recipe_of(tmp_path, model, rows=rows, length=4096)

    few, more = needed_bytes(recipe(4, 2)), needed_bytes(recipe(5, 2))
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336  # parameters
    assert more - few > 12 * block
    plan = memory_plan(recipe(4, 2), RankLayout(), on_cpu=False)
    assert few >= plan.total
    assert few - (plan.total - plan.loss) >= 10 * 2 * 4096 * 128_256


def test_a_step_has_the_tokens_of_all_its_rows(tmp_path):
    assert step_tokens(recipe_of(tmp_path, SHAPES["1b"], rows=3, length=128)) == 384


def test_step_times_are_the_mean_of_all_turns():
    assert mean_of([[1.0, 9.0], [2.0, 4.0]]) == 4.0


def test_the_corpus_it_writes_is_read_as_megatrons(tmp_path):
    name = write_megatron(tmp_path, tokens=20_000, mean_document=50)
    loader = Loader({"c": name}, sequence_length=64, global_batch_size=2)
    corpus = loader.corpora["c"]
    assert corpus.num_documents == 400
    assert corpus.num_tokens == (tmp_path / "documents.bin").stat().st_size
    assert corpus.num_tokens / 400 == pytest.approx(50, rel=0.2)
