"""An engine over the weights of a running job: any layout, weights bit for bit, and training untouched."""

import time
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from tests.rank_batches import RankBatches

from penstock.core.errors import UsageError
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.engine.sampling_params import Params, Sampling
from penstock.models import FAMILIES
from penstock.parallel.layout import ParallelConfig
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.text.tokenizer import train_tokenizer
from penstock.train import loop
from penstock.train.live_engine import LiveEngineFailed, gather_whole, live_engine, signs_of_life
from penstock.train.monitors.watchdog import Watchdog
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state, write_identity

TEXT = "the penstock feeds the turbine, für den es gebaut wurde " * 4
GREEDY = Params(sampling=Sampling(temperature=0.0), max_tokens=12)
LAYOUTS = [
    (1, {}),
    (2, {}),
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (2, {"replicate": 2}),
    (4, {"context": 2}),
    (4, {"tensor": 2}),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    tokenizer = train_tokenizer([TEXT] * 3, vocab_size=280)
    documents = [tokenizer.encode(TEXT[start:]) for start in range(0, 200, 3)]
    write_corpus(folder / "text", documents, vocab_size=280)
    tokenizer.save(folder / "text" / "tokenizer.json")
    save_manifest(folder / "text", replace(load_manifest(folder / "text"), tokenizer=tokenizer.fingerprint))
    return build_recipe(
        {
            "run": {"dir": str(folder / "run"), "steps": 4},
            "model": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "tie_word_embeddings": True,
            },
            "data": {
                "corpora": {"text": {"path": str(folder / "text")}},
                "sequence_length": 24,
                "global_batch_size": 4,
                "micro_batch_size": 1,
            },
            "optim": {"learning_rate": 0.01},
            "checkpoint": {"every": 100},
            "compute": "float32",
        }
    )


def of(recipe, folder, **axes):
    run = replace(recipe.run, dir=str(folder))
    return replace(recipe, run=run, parallel=ParallelConfig(**axes))


def answers(recipe, world, *, everywhere=False):
    state = open_state(recipe, world)
    if world.is_first:
        write_identity(recipe, state.loader)
    with live_engine(state, recipe, world, max_sequences=2, everywhere=everywhere) as llm:
        return None if llm is None else [out.text for out in llm.generate(["the pen", "für"], GREEDY)]


EVERYWHERE = "an engine on each rank"


@pytest.fixture(scope="module")
def answered(recipe, tmp_path_factory):
    """What the ranks of each layout answer."""
    folder = tmp_path_factory.mktemp("answered")
    axes_of = {str(layout): layout[1] for layout in LAYOUTS} | {EVERYWHERE: {}}

    def work(case, world):
        return answers(of(recipe, folder / case, **axes_of[case]), world, everywhere=case == EVERYWHERE)

    return RankBatches({str(layout): layout[0] for layout in LAYOUTS} | {EVERYWHERE: 2}, work)


@pytest.fixture(scope="module")
def alone(answered):
    (found,) = answered.of(str((1, {})))
    assert len(found) == 2
    return found


@pytest.mark.parametrize(("ranks", "axes"), LAYOUTS[1:], ids=str)
def test_an_engine_on_the_first_rank_answers_as_that_of_one_process(answered, alone, ranks, axes):
    """Initial weights do not depend on the layout, so neither may the answers."""
    assert answered.of(str((ranks, axes))) == [alone, *[None] * (ranks - 1)]


def test_every_rank_may_have_an_engine_of_its_own(answered, alone):
    assert answered.of(EVERYWHERE) == [alone] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_gathered_is_the_weights_bit_for_bit(recipe, tmp_path, dtype):
    def gathered(world):
        config = of(recipe, tmp_path / f"{world.ranks.world_size}", tensor=2)
        if world.ranks.world_size == 1:
            config = of(recipe, tmp_path / "1")
        state = open_state(config, world)
        model = FAMILIES["llama"](config.model).to(dtype) if world.is_first else None
        with torch.no_grad():
            gather_whole(state.model.state_dict(), model, world)
        return None if model is None else {name: t.float() for name, t in model.state_dict().items()}

    (whole,), (cut, *_) = on_ranks(gathered, ranks=1), on_ranks(gathered, ranks=4)
    assert whole.keys() == cut.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, cut[name]), name
        assert tensor.abs().sum() > 0, name


@pytest.mark.parametrize(("ranks", "axes"), [(1, {}), (2, {}), (2, {"pipeline": 2})], ids=str)
def test_losses_with_and_without_an_engine_in_between_are_equal(recipe, tmp_path, ranks, axes, monkeypatch):
    def losses(world, *, asks):
        config = of(recipe, tmp_path / str(asks), **axes)
        state = open_state(config, world)
        if world.is_first:
            write_identity(config, state.loader)
        torch.manual_seed(7)
        if asks:
            step = loop.train_step

            def and_ask(*given, **named):
                with live_engine(state, config, world, max_sequences=2) as llm:
                    if llm is not None:
                        llm.generate(["the pen", "für"], GREEDY)
                return step(*given, **named)

            monkeypatch.setattr(loop, "train_step", and_ask)  # of this process, and the last run in it
        return [(r["loss"], r["grad_norm"]) for r in records_of(state, config, world) if "loss" in r]

    for without, with_engine in on_ranks(
        lambda world: [losses(world, asks=asks) for asks in (False, True)], ranks=ranks
    ):
        assert len(without) == 4
        assert with_engine == without


@pytest.fixture(scope="module")
def base(recipe, tmp_path_factory):
    """A run to tune."""
    folder = tmp_path_factory.mktemp("base")

    def train(world):
        state = open_state(of(recipe, folder), world)
        write_identity(of(recipe, folder), state.loader)
        records_of(state, of(recipe, folder), world)

    on_ranks(train, ranks=1)
    return folder


def tuned(recipe, base, folder, tune, **axes):
    data = {"corpora": {"text": {"path": recipe.data.corpora["text"].path}}, "sequence_length": 24}
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": 3, "start_from": str(base)},
            "tune": {"rank": 4, **tune},
            "data": {**data, "global_batch_size": 4, "micro_batch_size": 1},
            "optim": {"learning_rate": 1e-4 if "base" in tune else 0.05},  # steps of int8 products part soon
            "parallel": axes,
            "compute": "float32",
        }
    )


ASKED = [3, 40, 77, 12, 99, 5, 60, 200, 31]


def logprobs(config, world, *, of_training=False):
    """Log-probabilities of the asked tokens after tuning, by the engine and by the network in training."""
    state = open_state(config, world)
    if world.is_first:
        write_identity(config, state.loader)
    records_of(state, config, world)
    found = []
    with live_engine(state, config, world, max_sequences=1) as llm:
        if llm is not None:
            out = llm.generate([ASKED], replace(GREEDY, num_prompt_logprobs=1))[0]
            found = [chosen.logprob for chosen in out.prompt_logprobs[1:]]
    if not of_training:
        return found
    with torch.no_grad():
        logits = state.model(torch.tensor([ASKED])).float().log_softmax(-1)[0]
    return found, logits[torch.arange(len(ASKED) - 1), torch.tensor(ASKED[1:])].tolist()


DORA = {"method": "dora"}
INT8 = {"method": "lora", "base": "int8"}
TUNED = [
    ({"method": "lora"}, 1e-4),
    ({"method": "dora", "layers": ["query", "down"]}, 1e-4),
    ({"method": "full"}, 1e-4),
    (INT8, 0.1),  # training rounds the activations too
]
LAYOUTS_TUNED = [
    (DORA, {}, 1e-3),
    (DORA, {"tensor": 2}, 1e-3),
    (DORA, {"pipeline": 2}, 1e-3),
    (INT8, {}, 0.05),
    (INT8, {"pipeline": 2}, 0.05),
]


@pytest.fixture(scope="module")
def asked(recipe, base, tmp_path_factory):
    """What `logprobs` returns on each rank: of one rank by what it tunes, of two by that and their axes."""
    folder = tmp_path_factory.mktemp("asked")
    cases = {str(tune): (1, tune, {}) for tune in (*(tune for tune, _ in TUNED), DORA)}
    cases |= {str((tune, axes)): (2, tune, axes) for tune, axes, _ in LAYOUTS_TUNED}

    def work(case, world):
        ranks, tune, axes = cases[case]
        config = tuned(recipe, base, folder / str([*cases].index(case)), tune, **axes)
        return logprobs(config, world, of_training=ranks == 1)

    return RankBatches({case: ranks for case, (ranks, *_) in cases.items()}, work)


@pytest.mark.parametrize(("tune", "tolerance"), TUNED, ids=str)
def test_adapters_are_part_of_the_engine(asked, tune, tolerance):
    ((engine, training),) = asked.of(str(tune))
    assert engine == pytest.approx(training, abs=tolerance)
    assert len(engine) == len(ASKED) - 1


@pytest.mark.parametrize(("tune", "axes", "tolerance"), LAYOUTS_TUNED, ids=str)
def test_adapters_of_any_layout_make_one_engine(asked, axes, tune, tolerance):
    ((alone, _),) = asked.of(str(tune))
    first, _ = asked.of(str((tune, axes)))
    assert first == pytest.approx(alone, abs=tolerance)


def test_a_failure_in_the_block_is_raised_on_every_rank_and_training_may_go_on(recipe, tmp_path):
    def fails(world):
        config = of(recipe, tmp_path)
        state = open_state(config, world)
        said = []
        engine = live_engine(state, config, world, max_sequences=1)
        with pytest.raises(LiveEngineFailed, match=r"no tokenizer\.json"), engine:
            pass
        if world.is_first:
            write_identity(config, state.loader)
        try:
            with live_engine(state, config, world, max_sequences=1) as llm:
                if llm is not None:
                    raise UsageError("The prompt is not one")
        except LiveEngineFailed as error:
            said.append(str(error))
        return said, len(records_of(state, config, world))

    for said, records in on_ranks(fails, ranks=2):
        assert said == ["The prompt is not one."]
        assert records >= 4


@pytest.mark.parametrize("moves_on", [True, False])
def test_work_of_the_first_rank_that_moves_on_trips_no_watchdog(tmp_path, moves_on):
    """Three times as long as the watchdogs wait; of work that stands still all ranks' report."""

    def works(world):
        ended = Event()
        rank = world.ranks.rank
        with Watchdog(tmp_path, rank=rank, world_size=2, hang_s=1.5, end=ended.set) as watchdog:
            state = SimpleNamespace(watch=watchdog, step=3)
            watchdog.doing("forward", step=2)
            watchdog.doing("step", step=3)  # the first step of a process has longer
            with signs_of_life(state, world, "evaluation") as progress:
                for _ in range(45 if world.is_first else 0):
                    time.sleep(0.1)
                    if moves_on:
                        progress("answers", 1, 2)
        return ended.is_set()

    assert on_ranks(works, ranks=2) == [not moves_on] * 2
