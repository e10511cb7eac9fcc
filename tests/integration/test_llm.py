"""The Python API: lists, streams, conversations, vectors; from tasks and threads; cancelled and closed."""

import asyncio
import json
import queue
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tests.loras import save_lora
from tests.tiny_models import save_talker
from transformers import AutoModel

import penstock
from penstock import LLM, EngineConfig, Params, Sampling
from penstock.checkpoint.hf import load_pretrained
from penstock.core.errors import ConfigError, EngineClosed, UsageError
from penstock.engine import text_processor
from penstock.engine.request import Request
from penstock.engine.sampling.grammar_text import regex
from penstock.engine.sampling_params import GREEDY

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "generate-in-python.md"
CONTEXT = 4096
TEN = Params(sampling=GREEDY, max_tokens=10, stop_ids=frozenset())
LONG = replace(TEN, max_tokens=4000)
CONFIG = EngineConfig(device="cpu", max_sequences=8, tokens_per_step=64, cache_gib=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_talker(tmp_path_factory.mktemp("model"), context=CONTEXT)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, CONFIG) as opened:
        yield opened


def leaves_no_block(llm):
    """Wait for cancelled answers to end: a request that comes after them is answered after them."""
    llm.generate("x", replace(TEN, max_tokens=1))
    return llm.thread.stats().used_blocks == 0


def test_a_list_of_prompts_is_answered_in_its_order(llm):
    prompts = [f"the {word}" for word in ("penstock", "turbine", "feeds")] * 4
    seen = []
    found = llm.generate(prompts, TEN, on_progress=lambda done, total: seen.append((done, total)))
    assert [answers.text for answers in found] == [llm.generate(prompt, TEN)[0].text for prompt in prompts]
    assert seen == [(done, 12) for done in range(1, 13)]
    assert all(answers.answers[0].finish == "length" for answers in found)


def test_a_stream_joins_to_the_answer_and_leaving_it_frees_its_blocks(llm):
    whole = llm.generate("the turbine", TEN)[0]
    pieces = list(llm.stream("the turbine", TEN))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(t for piece in pieces for t in piece.token_ids) == whole.token_ids
    stream = llm.stream("the turbine", LONG)
    next(stream)
    stream.close()
    assert leaves_no_block(llm)


def test_tasks_stream_side_by_side_and_one_that_leaves_frees_its_blocks(llm):
    async def text(prompt):
        return "".join([piece.text async for piece in llm.stream_async(prompt, TEN)])

    async def leave():
        pieces = llm.stream_async("the", LONG)
        await anext(pieces)
        await pieces.aclose()

    async def together():
        return await asyncio.gather(*(text(f"the {n}") for n in range(20)), *(leave() for _ in range(5)))

    texts = asyncio.run(together())[:20]
    assert texts == [llm.generate(f"the {n}", TEN)[0].text for n in range(20)]
    assert leaves_no_block(llm)


def test_threads_share_one_model(llm):
    found = {}

    def ask(n):
        found[n] = llm.generate(f"the {n}", TEN)[0].text

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: llm.generate(f"the {n}", TEN)[0].text for n in range(20)}


def test_a_conversation_is_answered_where_the_transcript_goes_on(llm):
    answer = llm.chat([{"role": "user", "content": "Hi"}], TEN)
    assert answer.prompt == tuple(llm.text_processor.encode("User: Hi\n\nAssistant:"))
    assert answer.token_ids == llm.generate([answer.prompt], TEN)[0].token_ids


@torch.inference_mode()
def test_a_vector_is_the_last_state_of_transformers_of_length_one(llm, folder):
    texts = ["the turbine", "the penstock feeds the turbine " * 20]  # the second takes several steps
    found = llm.embed(texts)
    theirs = AutoModel.from_pretrained(folder).eval()
    for text, vector in zip(texts, found, strict=True):
        expected = theirs(torch.tensor([llm.text_processor.encode(text)])).last_hidden_state[0, -1]
        np.testing.assert_allclose(vector, expected / expected.norm(), atol=1e-5)
    assert llm.embed("the turbine").shape == (1, 32)
    found_before = llm.thread.stats().prefix_found
    np.testing.assert_allclose(llm.embed(texts), found, atol=1e-5)  # from what is computed, but for the ends
    assert llm.thread.stats().prefix_found > found_before


def test_a_prompt_that_begins_like_another_is_found_computed(llm):
    prompt = list(range(1, 60))
    llm.generate([prompt], TEN)
    again = llm.generate([[*prompt, 7]], TEN)[0]
    assert again.num_cached == 48  # whole blocks of 16


def test_an_answer_whose_time_is_over_ends_with_what_it_has(llm):
    answer = llm.generate("the", replace(LONG, timeout_s=0.0))[0].answers[0]
    assert answer.finish == "deadline"
    assert leaves_no_block(llm)


def test_a_closed_model_cancels_what_runs_and_refuses_what_comes(folder):
    llm = LLM(folder, CONFIG)
    pieces = queue.SimpleQueue()
    for _ in range(24):  # eight run at once, so the last would take long
        llm.thread.submit(llm.request("the", LONG), pieces.put)
    llm.close()
    llm.close()
    finishes = [piece.finish for piece in iter(lambda: pieces.get_nowait() if pieces.qsize() else None, None)]
    assert len([finish for finish in finishes if finish]) == 24
    assert finishes[-1] == "cancelled"
    with pytest.raises(EngineClosed):
        llm.generate("the", TEN)


def test_a_model_that_nobody_holds_ends_its_thread(folder):
    llm = LLM(folder, CONFIG)
    thread = llm.thread
    llm.generate("the", TEN)
    del llm
    assert thread.drain(60.0)
    with pytest.raises(EngineClosed, match="The engine is closed"):
        thread.submit(Request(prompt=(1,), max_tokens=1), lambda _: None)


def test_what_cannot_be_answered_is_refused_before_anything_is_computed(llm):
    steps = llm.thread.stats().counts.steps
    with pytest.raises(UsageError, match="max_tokens"):
        llm.generate(["the", "the " * 20], replace(TEN, max_tokens=CONTEXT - 1))
    with pytest.raises(UsageError, match="A stop text is empty"):
        Params(stop_texts=("",))
    with pytest.raises(UsageError, match=r"a token id outside the .*got -1"):
        llm.generate([[5, -1]], TEN)
    with pytest.raises(UsageError, match="grammar has no known form"):
        llm.generate("the", Params(max_tokens=5, grammar=r"\d+"))
    assert llm.thread.stats().counts.steps == steps


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_answers": 0}, "num_answers must be at least 1"),
        ({"stop_texts": "END"}, "stop_texts must be a list or tuple of texts"),
        ({"num_prompt_logprobs": -1}, "num_prompt_logprobs must be from 0 to 20"),
        ({"num_prompt_logprobs": 21}, "num_prompt_logprobs must be from 0 to 20"),
        ({"timeout_s": float("nan")}, "timeout_s must be at least 0"),
        ({"timeout_s": "5"}, r"timeout_s must be at least 0 \(got '5'\)"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 3.5}, r"max_tokens must be a whole number \(got 3.5\)"),
        ({"num_answers": "2"}, "num_answers must be a whole number"),
        ({"priority": 0.5}, "priority must be a whole number"),
        ({"stop_texts": (5,)}, r"A stop text is not a text \(got \(5,\)\)"),
        ({"stop_texts": None}, "stop_texts must be a list or tuple of texts"),
        ({"stop_ids": 5}, r"stop_ids must be a set of token ids \(got 5\)"),
        ({"stop_ids": ["</s>"]}, "stop_ids must be a set of token ids"),
        ({"sampling": {"temperature": 0}}, r"sampling is not a Sampling \(got {'temperature': 0}\)"),
        (
            {"grammar": {"type": "object"}},
            r"not the text of a grammar .*with json_schema, regex, choice or lark of",
        ),
        ({"adapter": 3}, "adapter is not the name of an adapter"),
    ],
)
def test_settings_that_no_answer_could_follow_are_refused(settings, said):
    with pytest.raises(UsageError, match=said):
        Params(**settings)


def test_what_is_no_config_is_refused_before_anything_is_opened():
    with pytest.raises(UsageError, match=r"config is not an EngineConfig \(got 'int8'\)"):
        LLM("absent", "int8")


@pytest.fixture
def adapter(folder, tmp_path):
    """An adapter's folder, its answer to "the" up to the end token that the folder names, and that token."""
    made = save_lora(tmp_path / "adapter", load_pretrained(folder), rank=2, use_dora=True)
    with LLM(folder, replace(CONFIG, adapters={"a": made})) as llm:
        tokens = llm.generate("the", replace(TEN, adapter="a"))[0].token_ids
        known = llm.text_processor.tokenizer.vocab_size
    place = next(i for i, token in enumerate(tokens) if i > 1 and token < known and token not in tokens[:i])
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[place]}))
    return made, tokens[:place], tokens[place]


def test_an_adapter_added_later_ends_its_answers_as_one_that_was_there_from_the_start(folder, adapter):
    where, tokens, end = adapter
    ending = replace(TEN, stop_ids=None, adapter="a")
    with LLM(folder, replace(CONFIG, adapters={"a": where})) as llm:
        expected = llm.generate("the", ending)[0].answers[0]
        ends = llm.text_processor.of("a").stop_ids
    assert (expected.token_ids, expected.finish) == (tokens, "stop")
    with LLM(folder, CONFIG) as llm:
        before = llm.text_processor.stop_ids
        llm.add_adapter("a", where)
        assert llm.generate("the", ending)[0].answers[0] == expected
        assert llm.text_processor.of("a").stop_ids == ends == before | {end}
        assert llm.text_processor.stop_ids == before  # the model's own answers end as ever
        held = replace(
            ending, grammar=regex("(.|\n)*"), sampling=replace(TEN.sampling, logit_bias={end: 100})
        )
        assert llm.generate("the", held)[0].answers[0].finish == "stop"  # a grammar ends there, too
        assert llm.generate("the", replace(held, adapter=None))[0].answers[0].finish == "length"
        llm.remove_adapter("a")
        assert llm.generate("the", replace(held, adapter=None))[0].token_ids
        with pytest.raises(UsageError, match="Unknown adapter"):
            llm.generate("the", held)


def test_an_adapter_whose_end_tokens_cannot_be_read_is_not_added(adapter, llm):
    where, _, _ = adapter
    (where / "generation_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"generation_config.json is not valid JSON"):
        llm.add_adapter("a", where)
    with pytest.raises(UsageError, match="Unknown adapter"):
        llm.generate("the", replace(TEN, adapter="a"))


def test_an_adapter_is_unknown_until_its_tokenizer_and_template_are_read(adapter, llm, monkeypatch):
    def read(folder, load=text_processor.load_template):
        known.append("a" in llm.thread.engine.runner.adapters)
        return load(folder)

    (where, _, _), known = adapter, []
    monkeypatch.setattr(text_processor, "load_template", read)
    llm.add_adapter("a", where)
    assert known == [False]
    llm.remove_adapter("a")


def test_an_adapter_that_lacks_rows_of_tokens_in_its_template_is_named_in_the_log(
    adapter, llm, folder, caplog
):
    where, _, _ = adapter
    grown = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = [f"<|{i}|>" for i in range(llm.capacity.vocab_size - grown.get_vocab_size() + 2)]
    grown.add_special_tokens(names)
    grown.save(str(where / "tokenizer.json"))
    for written, is_said in ((names[0], False), (names[-1], True)):
        (where / "chat_template.jinja").write_text(written + "{{ messages[0].content }}")
        llm.add_adapter("a", where)
        llm.remove_adapter("a")
        said = f"Adapter a has no rows for tokens that its chat template writes ({written}), so its chats"
        assert (said in caplog.text) == ("rows" in caplog.text) == is_said
    with LLM(folder, replace(CONFIG, adapters={"from the start": where})) as other:
        assert "Adapter from the start has no rows" in caplog.text
        with pytest.raises(UsageError, match="outside the model's vocabulary"):
            other.chat([{"role": "user", "content": "the"}], replace(TEN, adapter="from the start"))


def test_the_files_of_an_adapter_are_read_while_others_are_answered(adapter, llm, monkeypatch):
    threads, read = [], text_processor.load_template
    monkeypatch.setattr(
        text_processor,
        "load_template",
        lambda folder: threads.append(threading.current_thread()) or read(folder),
    )
    llm.add_adapter("a", adapter[0])
    llm.remove_adapter("a")
    assert threads == [threading.current_thread()]


def test_an_adapter_whose_template_is_away_is_not_added(adapter, llm, monkeypatch):
    def fail(folder):
        raise OSError(f"{folder} is away")

    where, tokens, _ = adapter
    with monkeypatch.context() as patch:
        patch.setattr(text_processor, "load_template", fail)
        with pytest.raises(OSError, match="is away"):
            llm.add_adapter("a", where)
    llm.add_adapter("a", where)
    assert llm.generate("the", replace(TEN, stop_ids=None, adapter="a"))[0].token_ids == tokens
    llm.remove_adapter("a")


def test_each_prompt_may_have_settings_of_its_own(llm):
    each = [replace(TEN, max_tokens=n) for n in (2, 5)]
    assert [len(found.token_ids) for found in llm.generate(["the", "turbine"], each)] == [2, 5]
    assert llm.generate([], []) == []
    for params, said in (
        (each[:1], r"params must have one entry per prompt \(2\) \(got 1\)"),
        (None, r"params is neither a Params nor a list of them \(got None\)"),
        (Sampling(), "params is neither"),
    ):
        with pytest.raises(UsageError, match=said):
            llm.generate(["the", "turbine"], params)


def test_a_text_that_is_not_unicode_is_refused(llm):
    with pytest.raises(UsageError, match=r"half of a surrogate pair \(got '\\ud800'\). Decode its bytes"):
        llm.generate("the \ud800 turbine", TEN)


def test_a_prompt_may_be_an_array(llm):
    assert (
        llm.generate(np.array([[5, 9, 7]]), TEN)[0].token_ids == llm.generate([[5, 9, 7]], TEN)[0].token_ids
    )


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_token_ids_in_a_row_are_one_prompt(llm, kind):
    [answers] = llm.generate(kind([5, 9, 7]), TEN)
    assert answers.token_ids == llm.generate([[5, 9, 7]], TEN)[0].token_ids
    assert llm.generate([], TEN) == []


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ({"prompt": "the"}, r"must be a text or token ids \(got {'prompt'"),
        (b"the", "must be a text or token ids"),
        (5, r"must be a text or token ids \(got 5\)"),
        (["the", 5], r"must be a text or token ids \(got 5\)"),
        ([[5, 0.5]], r"an entry that is not a token id \(got 0.5\)"),
        ([["the"]], r"an entry that is not a token id \(got 'the'\). Several prompts are a list"),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(llm, prompts, said):
    with pytest.raises(UsageError, match=said):
        llm.generate(prompts, TEN)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"content": "Hi"}], "has no role"),
        ([{"role": "user"}], "is not text"),
        ([{"role": "user", "content": 5}], "is not text"),
        ("Hi", r"must be a list of messages \(got 'H'\)"),
        ({"role": "user", "content": "Hi"}, r"must be a list of messages \(got 'role'\)"),
    ],
)
def test_what_is_no_conversation_is_refused_in_words(llm, messages, said):
    with pytest.raises(UsageError, match=rf"{said}.*Write each as"):
        llm.chat(messages, TEN)


def test_a_text_that_fills_the_context_has_a_vector(folder):
    with LLM(folder, replace(CONFIG, max_context=64, max_sequences=1)) as small:
        assert small.capacity.num_blocks == 4  # the cache too is full
        np.testing.assert_allclose(np.linalg.norm(small.embed([[5, 9] * 32])), 1, atol=1e-5)
        with pytest.raises(UsageError, match=r"longer than the model's context of 64 tokens \(got 65\)"):
            small.embed([[5] * 65])


def test_a_task_that_waits_for_a_check_leaves_the_loop_to_others(llm, monkeypatch):
    checking, go_on = threading.Event(), threading.Event()
    check = llm.thread.engine.check

    def slow(request):
        checking.set()
        assert go_on.wait(60.0)
        check(request)

    async def together():
        asked = asyncio.create_task(anext(llm.stream_async("the", TEN)))
        while not checking.is_set():
            await asyncio.sleep(0)
        go_on.set()  # which a loop that is held up never does
        await asked

    monkeypatch.setattr(llm.thread.engine, "check", slow)
    asyncio.run(together())
    monkeypatch.undo()
    assert leaves_no_block(llm)


def test_a_cache_without_room_for_one_context_is_refused_with_the_arithmetic(folder):
    with pytest.raises(ConfigError, match=r"4,096 tokens are 256 blocks of 4.0 KiB, 1.0 MiB in total \(got "):
        LLM(folder, replace(CONFIG, cache_gib=0.0005))
    with pytest.raises(ConfigError, match="beyond the model's context of 4,096"):
        LLM(folder, replace(CONFIG, max_context=5000))
    with LLM(folder, replace(CONFIG, cache_gib=0.0005, max_context=1024)) as small:
        assert small.capacity.context == 1024


@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_a_device_that_is_not_there_is_refused(folder, device):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=rf"got '{device}'.*eave it out"):
        LLM(folder, replace(CONFIG, device=device))


FORKED = """
import os, sys
from penstock import LLM, EngineConfig, Params
with LLM(sys.argv[1], EngineConfig(device="cpu", cache_gib=0.01)) as llm:
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        llm.generate("the", Params(max_tokens=2))
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    llm.close()
    os._exit(7)
"""


def test_a_forked_process_is_told_to_open_the_model_itself(folder):
    program = [sys.executable, "-W", "ignore", "-c", FORKED, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("EngineClosed The engine runs in the process that opened it")


def test_the_program_of_the_documents_runs_as_printed(tmp_path, monkeypatch, capsys):
    [program] = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    save_talker(tmp_path / "runs" / "first", context=512)  # what it asks a conversation fills it
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_the_package_has_the_names_of_the_api():
    assert (penstock.LLM, penstock.Sampling) == (LLM, Sampling)
    with pytest.raises(AttributeError, match="no attribute 'Lllm'"):
        _ = penstock.Lllm
