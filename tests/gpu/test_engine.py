"""Answers of the engine against transformers in float64; the same with and without what only saves time."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tests.compiled_cases import Recorder, compiled_steps, engine_parts, graphs_of, logits_of

from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.decode_graphs import cuda_recorder
from penstock.engine.request import Request
from penstock.engine.sampling_params import Sampling
from penstock.nn.linear.float8 import RECIPES, has_native

transformers = pytest.importorskip("transformers")
VOCAB = 1009
SLACK = {
    "float32": 1e-3,
    "bfloat16": 0.15,
    "bfloat16, pages of 8 bits": 0.2,
    "int8": 0.3,
    "float8": 1.2,  # emulated on a CPU, these answers lack 0.4 to 0.85
}
"""How far below the likeliest an answer's tokens may be, in standard deviations of a position's logits: what
roundings of the type add up to over the layers. By chance a token is 2 or more below it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, is_tiny):
    """A model of 9 heads in groups of 3 whose answers wander."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=144 if is_tiny else 576,
        intermediate_size=208 if is_tiny else 1520,
        num_hidden_layers=2 if is_tiny else 5,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        initializer_range=0.1 if is_tiny else 0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exact(folder, device):
    """transformers' own model, in float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).to(device).eval()


@pytest.fixture(scope="module")
def requests(is_tiny):
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 10, 45] if is_tiny else [1, 10, 45, 131, 700]
    num_tokens = 12 if is_tiny else 40
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Request(prompt=tuple(prompt), max_tokens=num_tokens + 3 * i) for i, prompt in enumerate(prompts)]


def answers(folder, requests, device, **options):
    """Return each answer's tokens, and what the engine counted."""
    config = EngineConfig(device=str(device), max_sequences=4, cache_gib=0.05, **options)
    engine = build_engine(folder, config)
    try:
        return answers_of(engine, requests), engine.stats()
    finally:
        engine.close()


def answers_of(engine, requests):
    ids = [engine.add(request) for request in requests]
    told = [[] for _ in requests]
    while engine.has_work:
        for piece in engine.step():
            told[ids.index(piece.request_id)] += piece.token_ids
        engine.scheduler.check()
    return told


def assert_likeliest(told, requests, exact, slack):
    """Hold each token against the logits that transformers finds after the tokens before it."""
    for tokens, request in zip(told, requests, strict=True):
        assert len(tokens) == request.max_tokens
        whole = torch.tensor([[*request.prompt, *tokens]], device=exact.device)
        with torch.inference_mode():
            logits = exact(whole).logits[0, len(request.prompt) - 1 : -1]
        chosen = logits.gather(1, whole[0, len(request.prompt) :, None])[:, 0]
        allowed = request.sampling.allowed_token_ids
        best = logits.amax(1) if allowed is None else logits[:, list(allowed)].amax(1)
        lacking = (best - chosen) / logits.std(1)
        at = int(lacking.argmax())
        assert lacking[at] <= slack, (
            f"prompt of {len(request.prompt)}, token {at}: {lacking[at]:.2g} deviations"
        )


@pytest.mark.parametrize("way", SLACK)
def test_greedy_answers_are_the_likeliest_tokens_of_transformers(way, folder, exact, requests, device):
    weights, _, pages = way.partition(", ")
    if weights == "float8" and not has_native(RECIPES["float8_rowwise"], device.type):
        pytest.skip("this device has no float8 instructions by rows")
    told, _ = answers(folder, requests, device, weights=weights, cache="int8" if pages else "auto")
    assert len({token for tokens in told for token in tokens}) > 15, "a loop on few would prove little"
    assert_likeliest(told, requests, exact, SLACK[way])


@pytest.mark.computes("transformers generates until a number on the device says that all answers ended")
def test_greedy_answers_in_float32_are_those_of_generate(folder, exact, requests, device):
    told, _ = answers(folder, requests, device, weights="float32")
    for tokens, request in zip(told, requests, strict=True):
        prompt = torch.tensor([request.prompt], device=device)
        out = exact.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.max_tokens,
        )
        assert tokens == out[0, prompt.shape[1] :].tolist()


def test_answers_of_a_batch_invariant_engine_have_the_same_bits_alone(folder, requests, device):
    """Tokens and log-probabilities in bfloat16, of a step that is full and of one that is not."""
    asked = [replace(one, sampling=Sampling(num_logprobs=0, seed=i)) for i, one in enumerate(requests)]
    config = EngineConfig(
        device=str(device), max_sequences=4, cache_gib=0.05, weights="bfloat16", batch_invariant=True,
        prefix_caching=False,
    )  # fmt: skip
    engine = build_engine(folder, config)

    def bits_of(some):
        ids = [engine.add(request) for request in some]
        found = {request_id: [] for request_id in ids}
        while engine.has_work:
            for piece in engine.step():
                found[piece.request_id] += [(each.token, each.logprob) for each in piece.logprobs]
        return list(found.values())

    together = bits_of(asked)
    alone = [bits_of([request])[0] for request in asked]
    engine.close()
    assert all(together), "each answer has log-probabilities"
    assert together == alone


def test_prompts_that_begin_alike_are_computed_once_and_answered_as_before(folder, exact, device, is_tiny):
    shared = torch.randint(0, VOCAB, (50 if is_tiny else 333,), generator=torch.Generator().manual_seed(7))
    requests = [
        Request(prompt=(*shared.tolist(), *rest), max_tokens=10) for rest in ([5], [6, 7, 8], [5, 9], [11])
    ]
    config = EngineConfig(device=str(device), max_sequences=1, cache_gib=0.05, weights="float32")
    engine = build_engine(folder, config)
    told = answers_of(engine, requests)
    found = engine.stats().prefix_found
    engine.close()
    assert found >= 3 * (len(shared) - config.block_size)
    assert_likeliest(told, requests, exact, SLACK["float32"])


def test_drafts_change_no_answer(folder, exact, requests, device):
    """N-grams are right now and then, of four tokens."""
    few = Sampling(temperature=0.0, allowed_token_ids=(3, 7, 500, 1001))
    requests = [*requests[:3], Request(prompt=(3, 7, 500) * 12, max_tokens=40, sampling=few)]
    told, stats = answers(
        folder, requests, device, weights="float32", drafts="ngram", adapt_drafts=False, tokens_per_step=96
    )
    assert stats.counts.drafts > 0
    assert_likeliest(told, requests, exact, SLACK["float32"])


@pytest.mark.filterwarnings("ignore")  # of PEFT, which asks transformers in its old words
def test_adapters_of_one_step_each_answer_as_peft_does(folder, exact, device, tmp_path):
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    kinds = {
        "every layer": {"r": 5, "lora_alpha": 7, "target_modules": "all-linear"},
        "two layers": {
            "r": 16,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "down_proj"],
            "use_rslora": True,
        },
        "whole outputs": {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_dora": True},
    }
    merged, folders = {None: exact}, {}
    for seed, (name, options) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(**options, init_lora_weights=False)
        adapted = peft.get_peft_model(deepcopy(base), config).eval()
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_magnitude_vector" in parameter_name:  # PEFT's first ones change nothing
                parameter.data *= torch.empty_like(parameter).uniform_(0.5, 2.0)
        folders[name] = tmp_path / str(seed)
        adapted.save_pretrained(folders[name])
        merged[name] = adapted.merge_and_unload().to(device)
    prompt = (17, 4, 900, 33, 2, 81)
    requests = [Request(prompt=prompt, max_tokens=12, adapter=name) for name in merged]
    told, _ = answers(folder, requests, device, weights="float32", adapters=folders)
    assert len({tuple(tokens) for tokens in told}) == len(merged)
    for tokens, request in zip(told, requests, strict=True):
        whole = torch.tensor([[*prompt, *tokens]], device=device)
        with torch.inference_mode():
            logits = merged[request.adapter](whole).logits[0, len(prompt) - 1 : -1]
        lacking = (logits.amax(1) - logits.gather(1, whole[0, len(prompt) :, None])[:, 0]) / logits.std(1)
        assert lacking.max() <= SLACK["float32"], request.adapter


@pytest.mark.parametrize("graphs", ["graphs", "no graphs"])
@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
def test_compiled_steps_compute_what_plain_ones_do(weights, graphs, device, is_tiny):
    """On a GPU by Inductor and as CUDA graphs; on a CPU traced only, and a graph computes again."""
    if is_tiny and weights != "stored":
        pytest.skip("tiny steps are compiled with stored weights, which takes long enough")
    parts = engine_parts(weights, device=device)
    plain_parts = engine_parts(weights, device=device)
    plain = [logits_of(*plain_parts) for _ in range(2)]
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = compiled_steps(backend, parts, sizes=[1], has_any=True)
    compiled.compile_all()
    assert compiled.ready == {1}
    assert compiled._any.is_ready
    recorded = None
    if graphs == "graphs":
        record = cuda_recorder() if device.type == "cuda" else Recorder()
        recorded = graphs_of(*parts, compiled, record=record)
        assert recorded.sizes == [1, 2, 3]
    found = [logits_of(*parts, compiled, graphs=recorded) for _ in range(2)]
    for ours_of_turn, plain_of_turn in zip(found, plain, strict=True):
        for ours, theirs in zip(ours_of_turn, plain_of_turn, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # float32, sums in another order


def test_an_engine_with_graphs_answers_as_one_without(folder, exact, requests, device, is_tiny):
    if is_tiny:
        pytest.skip("a CPU records no graphs, and Inductor takes a minute there")
    config = EngineConfig(
        device=str(device),
        max_sequences=4,
        cache_gib=0.05,
        weights="bfloat16",
        tokens_per_step=16,
    )
    engine = build_engine(folder, config)
    assert engine.runner._graphs.sizes == [1, 2, 4]
    assert engine.runner._compiled.ready == {1}
    assert engine.runner._compiled._any.is_ready
    told = answers_of(engine, requests)
    engine.close()
    assert_likeliest(told, requests, exact, SLACK["bfloat16"])
