"""Adapters behind the server: each is a model by its name."""

import asyncio

import openai
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.serving import PATIENCE_S, make_model, serving

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

KINDS = {
    "legal": {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "down_proj"]},
    "team/support ü": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "use_rslora": True},
}
"""Adapters by the names that clients give; one is no file's name."""
NAMES = ["tiny", *KINDS]
LONG = "the penstock feeds the turbine; " * 4  # of several blocks, so that it can be found computed


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with adapters over one base."""
    where = tmp_path_factory.mktemp("adapters")
    folder = make_model(where / "tiny")
    words = ["--cache-gib", "0.05", "--cache", "int8"]  # pages of 8 bits, whose laws are the same
    for number, (name, kind) in enumerate(KINDS.items()):
        base = AutoModelForCausalLM.from_pretrained(folder)
        get_peft_model(base, LoraConfig(**kind, init_lora_weights=False)).save_pretrained(where / str(number))
        words += ["--adapter", f"{name}={where / str(number)}"]
    with serving(folder, *words) as running:
        yield running


@pytest.fixture
def client(server):
    with server.openai() as made:
        yield made


def complete(client, name, prompt, **more):
    return client.completions.create(model=name, prompt=prompt, temperature=0, **{"max_tokens": 8, **more})


def test_models_are_the_base_and_its_adapters(client):
    assert [(model.id, model.root) for model in client.models.list()] == [(name, "tiny") for name in NAMES]
    assert client.models.retrieve(NAMES[-1]).id == NAMES[-1]


def test_each_answers_in_its_own_way_by_its_own_name(client):
    answers = [complete(client, name, LONG) for name in NAMES]
    assert [answer.model for answer in answers] == NAMES
    assert len({answer.choices[0].text for answer in answers}) == len(NAMES)
    vectors = [client.embeddings.create(model=name, input="a").data[0].embedding for name in NAMES]
    assert len(set(map(tuple, vectors))) == len(NAMES)


def test_names_of_nothing_are_told_which_there_are(client):
    for name in ("other", "Legal", ""):
        with pytest.raises(openai.NotFoundError, match="there is tiny, legal, team/support ü"):
            complete(client, name, "a")


def test_a_prompt_is_found_computed_by_the_adapter_that_computed_it_only(client):
    prompt = "nobody else asks this; " * 6
    cached = [
        complete(client, name, prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens
        for name in (*NAMES, *NAMES)
    ]
    assert cached[: len(NAMES)] == [0] * len(NAMES)
    assert min(cached[len(NAMES) :]) > 0


async def streamed(client, name, prompt):
    stream = await client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    text = ""
    async for event in stream:
        assert event.model == name
        text += "".join(choice.delta.content or "" for choice in event.choices)
    return text


def test_streams_of_all_at_once_are_those_of_each_alone(server):
    asked = [(name, prompt) for name in NAMES for prompt in (LONG, "water", "a b c")]

    async def both():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", timeout=PATIENCE_S) as client:
            alone = [await streamed(client, *each) for each in asked]
            together = await asyncio.gather(*(streamed(client, *each) for each in asked * 4))
        return alone, together

    alone, together = asyncio.run(both())
    assert together == alone * 4
    assert len(set(alone)) > len(NAMES)
