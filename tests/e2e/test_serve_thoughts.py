"""Reasoning items and log-probabilities at `/v1/responses`, with the types of OpenAI's client."""

import pytest
import torch
from openai.types.responses import Response
from transformers import AutoModelForCausalLM

from tests.serving import serving, strict
from tests.tiny_models import save_reciter

GO = "<|go|>"
SCRIPT = ("<think>", "Let me ", "see.", "</think>", "\n\nIt is ", "a pipe.")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}{{ message.reasoning_content or '' }}"
    "{{ message.content }}{% endfor %}" + GO
)
ASKED = {"model": "tiny", "input": "the penstock", "temperature": 0}


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def thinker(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinker") / "tiny"
    save_reciter(folder, SCRIPT, after=GO, special=("<think>", "</think>") if request.param else ())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(folder, "--cache-gib", "0.05", "--split-reasoning") as running, running.openai() as client:
        yield folder, client


def test_thoughts_are_an_item_of_their_own_whole_and_streamed(thinker):
    _, client = thinker
    reply = client.responses.create(**ASKED)
    strict(Response, reply)
    thought = reply.output[0]
    assert (thought.type, [part.text for part in thought.content], thought.summary) == (
        "reasoning",
        ["Let me see."],
        [],
    )
    assert (reply.output_text, reply.usage.output_tokens_details.reasoning_tokens) == ("It is a pipe.", 2)
    events = list(client.responses.create(**ASKED, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert deltas == ["Let me ", "see."]
    [done] = [event.text for event in events if event.type == "response.reasoning_text.done"]
    assert done == "Let me see."
    opened = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert opened == ["reasoning", "message"]
    assert [item.type for item in events[-1].response.output] == opened


def test_thoughts_can_be_sent_back(thinker):
    _, client = thinker
    first = client.responses.create(**ASKED)
    turns = [{"role": "user", "content": "a"}, *first.output, {"role": "user", "content": "b"}]
    again = client.responses.create(**{**ASKED, "input": turns})
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "Let me see.", "content": "It is a pipe."},
        {"role": "user", "content": "b"},
    ]
    chat = client.chat.completions.create(model="tiny", messages=said, temperature=0)
    assert again.usage.input_tokens == chat.usage.prompt_tokens
    assert chat.choices[0].message.reasoning_content == "Let me see."
    for key in ("reasoning", "thinking"):
        said[1] = {"role": "assistant", key: "Let me see.", "content": "It is a pipe."}
        other = client.chat.completions.create(model="tiny", messages=said, temperature=0, max_tokens=1)
        assert other.usage.prompt_tokens == chat.usage.prompt_tokens


def test_log_probabilities_are_of_what_is_said(thinker):
    folder, client = thinker
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    reply = client.responses.create(**asked)
    strict(Response, reply)
    told = reply.output[-1].content[0].logprobs
    assert [entry.token for entry in told if entry.token in SCRIPT] == ["\n\nIt is ", "a pipe."]
    assert all(len(entry.top_logprobs) == 2 for entry in told)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    likeliest = model.lm_head.weight.max()
    assert likeliest == 10
    with torch.inference_mode():
        token = model.lm_head.weight.max(1).values.argmax()
        last = int(model.lm_head.weight[token].argmax())
        expected = model(torch.tensor([[last]])).logits[0, -1].log_softmax(-1).max().item()
    assert told[0].logprob == pytest.approx(expected, abs=1e-4)
    assert told[0].top_logprobs[0].token == told[0].token
    events = list(client.responses.create(**asked, stream=True))
    streamed = [
        one for event in events if event.type == "response.output_text.delta" for one in event.logprobs
    ]
    assert [one.logprob for one in streamed] == [one.logprob for one in told]
    assert client.responses.create(**ASKED).output[-1].content[0].logprobs == []
