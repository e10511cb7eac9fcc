"""Products and attention whose numbers for a token do not depend on the other tokens of a step."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.engine.assemble import engine_of
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.batch_invariance import ROWS, FixedRows, check_batch_invariant, fix_rows
from penstock.engine.model_runner.serving_layers import fuse, prepare
from penstock.engine.request import Request
from penstock.engine.sampling_params import Sampling
from penstock.models.decoder.model import Decoder
from penstock.nn import native
from tests.families import small_llama

SMALL = small_llama(vocab_size=97, hidden_size=80, num_attention_heads=10, num_key_value_heads=2)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, ROWS, ROWS + 1, 3 * ROWS - 7])
def test_a_product_of_fixed_rows_gives_a_token_the_same_bits_beside_any_others(count, dtype):
    torch.manual_seed(0)
    called = []
    linear = torch.nn.Linear(48, 40, dtype=dtype)
    linear.register_forward_hook(lambda _, given, __: called.append(len(given[0])))
    fixed, x = FixedRows(linear), torch.randn(1, count, 48, dtype=dtype)
    out = fixed(x)
    assert out.shape == (1, count, 40)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, linear.weight, linear.bias))
    for token in range(0, count, 17):
        assert torch.equal(fixed(x[:, token : token + 1]), out[:, token : token + 1])
    assert set(called) == {ROWS}


def test_every_matrix_of_a_model_is_multiplied_by_fixed_rows():
    model = Decoder(SMALL).eval()
    fuse(model)
    prepare(model, "stored")
    plain = deepcopy(model)
    fix_rows(model)
    fixed = [name for name, layer in model.named_modules() if isinstance(layer, FixedRows)]
    assert len(fixed) == 4 * SMALL.num_hidden_layers + 1  # merged query, key, value; output; gate, up; down
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        found, expected = (each.logits(each.hidden(ids)) for each in (model, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "model", "device", "message"),
    [
        ({"cache": "int8"}, {"num_attention_heads": 8}, CPU, "more than 4 query heads"),
        ({"compile": "on"}, {}, CPU, "uncompiled blocks"),
        ({"adapters": {"a": "folder"}}, {}, GPU, "no adapters on a GPU"),
        ({"tensor_parallel": 2}, {}, GPU, "one process on a GPU"),
    ],
)
def test_what_cannot_be_invariant_is_refused(options, model, device, message, monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda: True)
    config = EngineConfig(**options, batch_invariant=True)
    shape = replace(SMALL, **model)
    with pytest.raises(ConfigError, match=f"batch_invariant needs {message}"):
        check_batch_invariant(config, shape, device)
    check_batch_invariant(replace(config, batch_invariant=False), shape, device)


def test_a_cpu_without_operators_is_refused(monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"the C\+\+ operators on a CPU \(got 'none'\). Install g\+\+"):
        check_batch_invariant(EngineConfig(batch_invariant=True), SMALL, CPU)


def answers(engine, requests):
    ids = [engine.add(request) for request in requests]
    told = {request_id: [] for request_id in ids}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            told[delta.request_id] += [(each.token, each.logprob) for each in delta.logprobs]
    return [told[request_id] for request_id in ids]


@pytest.mark.skipif(not native.is_available(), reason="the operators are what makes CPUs invariant")
@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_not_a_bit_of_an_answer_depends_on_neighbours(dtype, weights, cache):
    torch.manual_seed(1)
    model = Decoder(SMALL).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    config = EngineConfig(
        batch_invariant=True, weights=weights, cache=cache, max_sequences=8, tokens_per_step=24, block_size=4,
        max_context=64, cache_gib=0.001, prefix_caching=False,
    )  # fmt: skip
    engine = engine_of(model, config)
    chance = Sampling(temperature=0.9, top_p=0.95, num_logprobs=0)
    requests = [
        Request(
            prompt=tuple((7 * i + 31 * n) % 97 for i in range(1 + 5 * n)),
            max_tokens=10 + n,
            sampling=replace(chance, seed=n),
        )
        for n in range(9)
    ]
    together = answers(engine, requests)
    alone = [answers(engine, [request])[0] for request in requests]
    engine.close()
    assert together == alone
