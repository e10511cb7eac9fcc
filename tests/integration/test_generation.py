"""Greedy answers against `transformers.generate`, token for token, and an opened folder end to end."""

from dataclasses import replace

import pytest
import torch
from tests.tiny_models import SHAPE, of_every_family
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.core.errors import AnswerFailed, ModelError, UsageError
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY, Params, Sampling
from penstock.engine.text_processor import TextProcessor
from penstock.models import FAMILIES
from penstock.text.chat_template import ChatTemplate
from penstock.text.tokenizer import train_tokenizer

SMALL = {
    **SHAPE,
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
CONFIGS = {**of_every_family(**SMALL), "llama-dynamic": LlamaConfig(**SMALL, rope_parameters=DYNAMIC)}
SMALL_ENGINE = EngineConfig(device="cpu", max_sequences=4, tokens_per_step=32, block_size=4)
FORTY = Params(sampling=GREEDY, max_tokens=40, stop_ids=frozenset())
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], list(range(100, 145))]


def test_every_family_generates():
    assert {config.model_type for config in CONFIGS.values()} == set(FAMILIES)


def saved(theirs, folder):
    """Write a folder as `save_pretrained` and a Hub download leave it, with a tokenizer of fewer tokens."""
    theirs.save_pretrained(folder)
    train_tokenizer(["the penstock feeds the turbine, größer"] * 9, vocab_size=300).save(
        folder / "tokenizer.json"
    )
    return folder


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request, tmp_path_factory):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    folder = saved(theirs, tmp_path_factory.mktemp(request.param))
    with LLM(folder, SMALL_ENGINE) as ours:
        yield theirs, ours


def continued(theirs, prompt, **options):
    ids = torch.tensor([prompt])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, **options
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_answers_equal_those_of_transformers(pair):
    theirs, ours = pair
    expected = [continued(theirs, prompt) for prompt in PROMPTS]
    assert all(len(set(tokens)) > 5 for tokens in expected)  # a loop on one token would prove little
    alone = [ours.generate([prompt], FORTY)[0] for prompt in PROMPTS]
    assert [list(found.token_ids) for found in alone] == expected
    together = ours.generate(PROMPTS, FORTY)
    assert [list(found.token_ids) for found in together] == expected


@pytest.mark.parametrize("max_context", [40, 41])
def test_a_server_chooses_the_divisors_of_longrope_by_its_longest_text(max_context, tmp_path):
    config = CONFIGS["phi4-mini"]
    rule = {**config.rope_parameters, "original_max_position_embeddings": 40}
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        type(config)(**SMALL, original_max_position_embeddings=40, rope_parameters=rule)
    ).eval()
    prompt = list(range(100, 100 + max_context - 1))
    with torch.no_grad():  # of a text that is as long as the server allows
        expected = theirs(torch.tensor([[*prompt, 0]])).logits[0].log_softmax(-1)
    with LLM(saved(theirs, tmp_path), replace(SMALL_ENGINE, max_context=max_context)) as ours:
        params = Params(sampling=GREEDY, max_tokens=1, num_prompt_logprobs=1)
        (found,) = ours.generate([prompt], params)
    for row, one in enumerate(found.prompt_logprobs[1:]):
        assert one.logprob == pytest.approx(expected[row, prompt[row + 1]].item(), abs=1e-4)


def test_the_logprobs_of_a_prompt_are_those_of_transformers(pair):
    theirs, ours = pair
    params = Params(sampling=GREEDY, max_tokens=3, num_prompt_logprobs=2)
    for found, prompt in zip(
        ours.generate([*PROMPTS, PROMPTS[2]], params), [*PROMPTS, PROMPTS[2]], strict=True
    ):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
        first, *others = found.prompt_logprobs
        assert first is None
        assert [one.token for one in others] == prompt[1:]
        for row, one in enumerate(others):
            assert one.logprob == pytest.approx(expected[row, prompt[row + 1]].item(), abs=1e-4)
            assert list(one.top.values()) == pytest.approx(expected[row].topk(2).values.tolist(), abs=1e-4)


def test_the_scores_of_continuations_are_those_of_transformers(pair):
    """Together and in small steps, with the context in the cache or not, as the likeliest or not."""
    theirs, ours = pair
    requests, expected = [], []
    for prompt in PROMPTS:
        with torch.inference_mode():
            logprobs = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
        longest = [*prompt[len(prompt) // 2 + 1 :], 7]
        continuations = [longest, longest[-1:], logprobs[-1:].argmax(-1).tolist()]
        rows = [logprobs[-len(each) :] for each in continuations]
        requests.append(
            Request(
                prompt=tuple(prompt),
                max_tokens=0,
                task="score",
                continuations=tuple(map(tuple, continuations)),
            )
        )
        expected.append(
            [
                (
                    row.gather(1, torch.tensor(each)[:, None]).sum().item(),
                    row.argmax(-1).tolist() == each,
                )
                for row, each in zip(rows, continuations, strict=True)
            ]
        )
    for found, told in zip(ours.collect(requests * 2), expected * 2, strict=True):
        (answer,) = found.answers
        assert [one.logprob for one in answer.scores] == pytest.approx([one for one, _ in told], abs=1e-4)
        assert [one.is_greedy for one in answer.scores] == [is_greedy for _, is_greedy in told]
        assert (answer.finish, answer.token_ids) == ("stop", ())


def test_a_context_that_is_scored_once_is_not_computed_again(pair):
    _, ours = pair
    context = tuple(range(200, 240))
    ours.collect([Request(prompt=context, max_tokens=0, task="score")])
    choices = [
        Request(prompt=(*context, 5), max_tokens=0, task="score", continuations=((5, last),))
        for last in (6, 7)
    ]
    assert [found.num_cached for found in ours.collect(choices)] == [
        36,
        36,
    ]  # but for the last block's tokens


def test_an_end_token_ends_the_answer_where_transformers_ends_it(pair):
    theirs, ours = pair
    prompt = PROMPTS[1]
    end = continued(theirs, prompt)[9]
    *expected, last = continued(theirs, prompt, eos_token_id=end, pad_token_id=end)
    assert last == end
    pieces = list(ours.stream(prompt, replace(FORTY, stop_ids=frozenset({end}))))
    assert [token for piece in pieces for token in piece.token_ids] == expected
    assert pieces[-1].finish == "stop"


def test_an_answer_can_be_repeated_from_any_token(pair):
    ours, sampling = pair[1], Sampling(temperature=1.0, top_p=1.0, seed=5)
    whole = ours.generate([PROMPTS[1]], Params(sampling=sampling, max_tokens=20))[0].token_ids
    prompt = [*PROMPTS[1], *whole[:8]]
    rest = ours.generate([prompt], Params(sampling=sampling, max_tokens=12))[0].token_ids
    assert whole[8:] == rest


def test_answers_to_one_prompt_differ_by_their_seeds_only(pair):
    ours = pair[1]
    params = Params(sampling=Sampling(temperature=1.0, top_p=1.0), max_tokens=20, num_answers=3)
    first, again = (ours.generate([PROMPTS[2]], params)[0].answers for _ in range(2))
    assert first == again
    assert len({answer.token_ids for answer in first}) == 3
    assert ours.generate([PROMPTS[2]], replace(params, num_answers=1))[0].answers == first[:1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    return saved(theirs, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, SMALL_ENGINE) as opened:
        yield opened


def answer(llm, prompt="the turbine", **options):
    pieces = list(llm.stream(prompt, Params(sampling=GREEDY, **options)))
    return "".join(p.text for p in pieces), [t for p in pieces for t in p.token_ids], pieces[-1].finish


def test_streamed_text_is_the_text_of_the_tokens(llm):
    text, tokens, finish = answer(llm, max_tokens=60)
    assert text == llm.text_processor.tokenizer.decode(tokens)
    assert len(tokens) == 60
    assert finish == "length"


def test_an_end_token_in_generation_config_ends_the_answer(folder, llm, tmp_path):
    _, tokens, _ = answer(llm, max_tokens=20)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [399, {tokens[7]}]}}')
    with LLM(tmp_path, SMALL_ENGINE) as other:
        _, stopped, finish = answer(other, max_tokens=20)
    assert (stopped, finish) == (tokens[: tokens.index(tokens[7])], "stop")


def test_a_stop_text_ends_the_answer_before_it(llm):
    text, _, _ = answer(llm, max_tokens=40)
    stop = text[10:13]
    stopped, _, finish = answer(llm, max_tokens=40, stop_texts=(stop,))
    assert (stopped, finish) == (text[: text.index(stop)], "stop")


def test_the_context_is_filled_and_not_exceeded(llm):
    prompt = [3] * 500
    assert len(llm.generate([prompt], Params(sampling=GREEDY))[0].token_ids) == 12
    with pytest.raises(UsageError, match="max_tokens must be from 1 to 12"):
        llm.stream(prompt, Params(max_tokens=13))
    with pytest.raises(UsageError, match=r"context of 512 tokens \(got 512\). Shorten it to at most 511"):
        llm.generate([[3] * 512])


def test_tokens_that_the_model_does_not_know_are_refused(llm):
    with pytest.raises(UsageError, match=r"vocabulary of 400 \(got 400\)"):
        llm.generate([[1, 400]])


def test_an_empty_prompt_starts_a_new_document(llm):
    assert llm.text_processor.encode("") == [llm.text_processor.tokenizer.eos_id]


def test_a_tokenizer_that_begins_texts_with_a_token_is_followed(folder, tmp_path):
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, -1]}')
    words = TextProcessor.load(tmp_path / "tokenizer.json")
    assert 7 in words.stop_ids
    assert -1 not in words.stop_ids  # which some folders write for none
    assert words.encode("the turbine") == tokenizer.encode("the turbine").ids
    assert words.encode("the turbine")[0] == begin


def test_the_tokens_of_a_template_are_tokens_and_those_of_a_prompt_are_text(folder):
    name = "<|endoftext|>"
    template = ChatTemplate(source="{{ messages[0].content }}" + name)
    words = replace(TextProcessor.load(folder / "tokenizer.json"), template=template)
    ids = words.encode_chat([{"role": "user", "content": "the turbine"}])
    assert ids[-1] == words.tokenizer.eos_id
    assert words.tokenizer.eos_id not in words.encode(name)


def test_what_the_model_computes_must_be_numbers(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(tmp_path, SMALL_ENGINE) as broken:
        with pytest.raises(AnswerFailed, match=r"not finite. Use an earlier checkpoint of the run\."):
            broken.generate("the turbine")
        assert broken.thread.failure is None
        assert broken.thread.stats().used_blocks == 0


def test_a_folder_without_a_tokenizer_is_refused(folder, tmp_path):
    for file in folder.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        LLM(tmp_path, SMALL_ENGINE)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has weights and no config\.json"):
        LLM(tmp_path, SMALL_ENGINE)
    with pytest.raises(UsageError, match=r"is not a folder\. Give [^.]*\.$"):
        LLM(tmp_path / "absent")
    with pytest.raises(UsageError, match="`hf download nobody/model --local-dir DIR`"):
        LLM("nobody/model")
