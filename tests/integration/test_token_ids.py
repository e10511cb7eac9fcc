"""Each place where a text becomes token ids has those of the library that trained the model."""

import json
import shutil
from itertools import chain
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from lm_eval.models.huggingface import HFLM
from tests.in_process import run_cli
from tests.tiny_models import SHAPE
from tokenizers import normalizers, processors
from transformers import AutoModel, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from penstock import LLM, EngineConfig
from penstock.core.errors import InputError, UsageError
from penstock.data.corpus.open import open_corpus
from penstock.engine.embedding_rules import read_rules
from penstock.engine.text_processor import TextProcessor
from penstock.evaluation.language_model import EngineModel
from penstock.serve.errors import ApiError
from penstock.serve.routes.embeddings import EmbeddingsRequest, _requests
from penstock.text.tokenizer import train_tokenizer

TEXTS = ["the penstock feeds the turbine", " größer\n", "日本", "a"]
FRAMES = {
    "none": None,
    "start": "<s> $A",
    "end": "$A </s>",
    "both": "<s> $A </s>",
    "prefix of several": "<s> <x> $A <x>",
}


def save_tokenizer(folder, frame):
    made = tokenizers.Tokenizer.from_str(train_tokenizer(TEXTS * 9, vocab_size=280).content.decode())
    made.add_special_tokens(["<s>", "</s>", "<x>"])
    if frame:
        names = ("<s>", "</s>", "<x>")
        made.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=frame, special_tokens=[(name, made.token_to_id(name)) for name in names]
            ),
        ])  # fmt: skip
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "</s>",
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<x>{{ m.content }}</s>{% endfor %}")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


@pytest.fixture(params=FRAMES)
def folder(request, tmp_path):
    save_tokenizer(tmp_path, FRAMES[request.param])
    return tmp_path


def test_each_rule_against_transformers(folder):
    ours, theirs = TextProcessor.load(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        whole = theirs(text)["input_ids"]
        before = whole[: len(whole) - len(bare) - len(ours.end_ids)]
        assert ours.encode_embedded(text) == whole, "embeddings: all that the post-processor adds"
        assert ours.encode(text) == [*before, *bare], "prompts: what it adds in front"
        assert ours.tokenizer.encode(text) == bare, "documents: nothing"
        messages = [{"role": "user", "content": text}]
        chat = theirs.apply_chat_template(messages, return_dict=False)
        assert ours.encode_chat(messages) == chat, "chats: what the template writes"


def test_documents_have_their_own_tokens_and_the_end_token(folder):
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = folder / "corpus"
    arguments = ("--tokenizer", folder / "tokenizer.json", "--out", out)
    assert run_cli("data", "prepare", folder / "in.jsonl", *arguments).returncode == 0
    theirs = AutoTokenizer.from_pretrained(folder)
    corpus = open_corpus(out)
    end = corpus.manifest.eos_id
    expected = [[*theirs(text, add_special_tokens=False)["input_ids"], end] for text in TEXTS]
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [*chain.from_iterable(expected)]


@pytest.fixture(scope="module")
def network():
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "vocab_size": 320}))


@pytest.mark.parametrize("begin", [None, "<s>"])
@pytest.mark.parametrize("frame", FRAMES)
def test_prompts_of_evaluations_are_those_of_lm_eval(tmp_path, network, frame, begin):
    """Without the tokens that a post-processor adds at the end: lm-eval has them before the choices."""
    save_tokenizer(tmp_path, FRAMES[frame])
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": begin}))
    theirs = HFLM(network, tokenizer=AutoTokenizer.from_pretrained(tmp_path), device="cpu")
    text = TextProcessor.load(tmp_path / "tokenizer.json")
    ours = EngineModel(SimpleNamespace(text_processor=SimpleNamespace(of=lambda _: text)))

    def bare(ids):
        rest = len(ids) - len(text.end_ids)
        return ids[:rest] if tuple(ids[rest:]) == tuple(text.end_ids) else ids

    for prompt in (*TEXTS, "<s>the", "</s>the", "the </s>"):
        assert ours.tok_encode(prompt) == bare(theirs.tok_encode(prompt))
        assert ours.tok_encode(prompt, add_special_tokens=False) == theirs.tok_encode(
            prompt, add_special_tokens=False
        )
    assert ours.prefix_token_id == theirs.prefix_token_id
    if not text.end_ids:
        for context, choice in (("the turbine", " feeds"), ("the ", "penstock"), ("<s>a", " b")):
            assert ours._encode_pair(context, choice) == theirs._encode_pair(context, choice)
    ours.close()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A folder of Qwen3-Embedding's shape, with the files of sentence-transformers."""
    folder = tmp_path_factory.mktemp("embedder")
    torch.manual_seed(0)
    shape = {**SHAPE, "vocab_size": 320}
    Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True)).save_pretrained(folder)
    config = (folder / "config.json").read_text()
    save_tokenizer(folder, "$A <x>")
    (folder / "config.json").write_text(config)
    save_modules(folder, {"embedding_dimension": 32, "pooling_mode": "lasttoken"}, prompt="the ")
    return folder


def save_modules(folder, pooling, prompt="", more=()):
    kinds = ("Transformer", "Pooling", "Normalize", *more)
    prefix = "sentence_transformers.models."
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": prefix + kind}
               for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": prompt, "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def vectors_of(folder, texts):
    """Return what sentence-transformers 6.2 computes: prompt, post-processor, last state, length 1."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    found = []
    for text in texts:
        ids = tokenizer(read_rules(folder).prompt + text, return_tensors="pt")
        with torch.no_grad():
            state = model(**ids).last_hidden_state[0, -1]
        found.append(torch.nn.functional.normalize(state, dim=0))
    return torch.stack(found)


def test_embeddings_are_those_of_sentence_transformers(embedder):
    with LLM(embedder, EngineConfig(device="cpu", cache_gib=0.01)) as llm:
        ours = torch.from_numpy(llm.embed(TEXTS))
        as_ids = torch.from_numpy(llm.embed([llm.text_processor.encode_embedded(text) for text in TEXTS]))
    torch.testing.assert_close(ours, vectors_of(embedder, TEXTS), atol=1e-5, rtol=0)
    assert torch.equal(ours, as_ids), "token ids are taken as they are"


@pytest.mark.parametrize(
    ("pooling", "more", "named"),
    [
        ({"pooling_mode": "mean"}, (), "mean"),
        ({"pooling_mode": ["cls", "max"]}, (), "cls, max"),
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": False}, (), "cls_token"),
        ({}, (), "mean"),
        ({"pooling_mode_lasttoken": True}, ("Dense",), "lasttoken, Dense"),
    ],
)
def test_another_pooling_is_refused(tmp_path, pooling, more, named):
    save_modules(tmp_path, pooling, more=more)
    with pytest.raises(UsageError, match=f"not the state at the last token .*{named}"):
        read_rules(tmp_path).check()


def test_folders_of_last_tokens_are_read_in_both_spellings(tmp_path):
    read_rules(tmp_path).check()
    for pooling in (
        {"pooling_mode": "lasttoken"},
        {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False},
    ):
        save_modules(tmp_path, pooling)
        read_rules(tmp_path).check()
    (tmp_path / "modules.json").write_text("[3]")
    with pytest.raises(InputError, match="not a list of modules"):
        read_rules(tmp_path)


@pytest.mark.parametrize(
    ("settings", "tokenizer", "max_tokens", "unsupported"),
    [
        ({"max_seq_length": 6, "do_lower_case": False}, {}, 6, ()),
        ({"max_seq_length": None}, {"model_max_length": 7}, 7, ()),
        ({}, {"model_max_length": 1e30}, None, ()),
        ({"max_seq_length": 6, "tokenizer_args": {"model_max_length": 5}}, {}, 5, ()),
        ({"do_lower_case": True}, {}, None, ("do_lower_case: true",)),
        ({"processor_kwargs": {"do_lower_case": True}}, {}, None, ("do_lower_case: true",)),
        ({"processing_kwargs": {"text": {"max_length": 9}}}, {}, None, ("processing_kwargs",)),
        ({"transformer_task": "fill-mask"}, {}, None, ("transformer_task",)),
        ({"modality_config": {"text": {"method": "get_text_features"}}}, {}, None, ("modality_config",)),
        (
            {
                "transformer_task": "feature-extraction",
                "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                "module_output_name": "token_embeddings",
                "model_args": {"dtype": "bfloat16"},
            },
            {},
            None,
            (),
        ),
    ],
)
def test_settings_of_the_encoder_are_applied_or_refused_by_name(
    tmp_path, settings, tokenizer, max_tokens, unsupported
):
    save_modules(tmp_path, {"pooling_mode": "lasttoken"})
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    rules = read_rules(tmp_path)
    assert rules.max_tokens == max_tokens
    if unsupported:
        with pytest.raises(UsageError, match=f"does not apply .*{unsupported[0]}"):
            rules.check()
    else:
        rules.check()


def test_a_tokenizer_that_lowers_case_itself_is_that_of_do_lower_case(tmp_path):
    save_modules(tmp_path, {"pooling_mode": "lasttoken"})
    (tmp_path / "sentence_roberta_config.json").write_text('{"do_lower_case": true}')
    lower = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    for normalizer, is_refused in (
        (normalizers.NFC(), True),
        (lower, False),
        (normalizers.Lowercase(), False),
    ):
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.normalizer = normalizer
        made.save(str(tmp_path / "tokenizer.json"))
        assert bool(read_rules(tmp_path).unsupported) == is_refused


def test_a_text_above_the_length_of_the_encoder_is_refused(embedder, tmp_path):
    folder = shutil.copytree(embedder, tmp_path / "limited")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    with LLM(folder, EngineConfig(device="cpu", cache_gib=0.01)) as llm:
        assert len(llm.embed(["a"])) == 1
        with pytest.raises(UsageError, match=r"at most 9 tokens .*got .a text of \d\d"):
            llm.embed(["a", TEXTS[0] * 2])


@pytest.mark.parametrize("settings", [{}, {"max_seq_length": 5}])
def test_a_server_truncates_as_sentence_transformers_where_it_is_asked_to(tmp_path, settings):
    save_tokenizer(tmp_path, FRAMES["both"])
    save_modules(tmp_path, {"pooling_mode": "lasttoken"}, prompt="the ")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    served = SimpleNamespace(
        text_processor=TextProcessor.load(tmp_path / "tokenizer.json"),
        context=7,
        vocab_size=320,
        adapter=None,
    )
    limits = SimpleNamespace(max_texts=9, deadline_s=None)
    service = SimpleNamespace(served=SimpleNamespace(of=lambda _: served), limits=limits)
    body = EmbeddingsRequest(input=TEXTS[0], truncate_prompt_tokens=-1)
    made = [list(one.prompt) for one in _requests("input", TEXTS[0], body, service, client="")]
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    length = settings.get("max_seq_length", 7)
    assert made == [theirs("the " + TEXTS[0], truncation=True, max_length=length)["input_ids"]]
    with pytest.raises(ApiError, match=f"{length}") as refused:
        _requests("input", TEXTS[0], EmbeddingsRequest(input=TEXTS[0]), service, client="")
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_truncated_text_keeps_what_the_post_processor_adds(tmp_path, side):
    save_tokenizer(tmp_path, FRAMES["both"])
    served = SimpleNamespace(
        text_processor=TextProcessor.load(tmp_path / "tokenizer.json"),
        context=99,
        vocab_size=320,
        adapter=None,
    )
    limits = SimpleNamespace(max_texts=9, deadline_s=None)
    service = SimpleNamespace(served=SimpleNamespace(of=lambda _: served), limits=limits)

    def ids_of(given, length):
        body = EmbeddingsRequest(input=given, truncate_prompt_tokens=length, truncation_side=side)
        return [list(one.prompt) for one in _requests("input", given, body, service, client="")]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path, truncation_side=side or "right")
    expected = tokenizer(TEXTS[0], truncation=True, max_length=5)["input_ids"]
    assert ids_of([TEXTS[0]], 5) == [expected]
    assert ids_of(TEXTS[0], 97) == [tokenizer(TEXTS[0])["input_ids"]]
    assert ids_of([5, 6, 7], 2) == [[6, 7] if side == "left" else [5, 6]], "token ids are taken as they are"
    with pytest.raises(ApiError, match="leaves no room for the text: the tokenizer adds 2 tokens"):
        ids_of(TEXTS[0], 2)
