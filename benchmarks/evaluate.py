"""How long does an evaluation take, beside lm-eval's own `hf` model at its best batch size?

    python benchmarks/evaluate.py --out benchmarks/results      # about half an hour on two cores
    python benchmarks/evaluate.py --questions 40 --rounds 1     # two minutes

Multiple choice as hellaswag asks it: questions of four choices of several words each, with five examples in
front, which are the same for all questions (`first_n`) or drawn for each (lm-eval's default). Both sides are
called by lm-eval's own `evaluate`, in one process, in float32, with the same threads, on a Llama of random
weights (41M parameters, 32,000 tokens); `hf` first tries batch sizes on a few of the questions, and the best
is taken. Settings take turns, round by round. Wall times have all but the loading of the model: lm-eval
writes the prompts, the tokenizer reads them. What lm-eval takes by itself, with a model that answers at once,
is filed too, and how far the log-likelihoods are apart.
"""

import argparse
import json
import random
import statistics
import sysconfig
import tempfile
from pathlib import Path

import torch
from measuring import memory_kib
from results_file import file_result

from penstock.checkpoint.hf import save_pretrained
from penstock.core import clock, env
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.evaluation.language_model import EngineModel
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.tasks import load_tasks
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.text.tokenizer import EOS, train_tokenizer

CHOICES, SHOTS = 4, 5
SOURCES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "idlelib",
)


def words_of_the_library():
    """Return the words of sources of the standard library, with their line ends."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [file for name in SOURCES for file in sorted((stdlib / name).glob("*.py"))]
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def save_model(folder, texts, *, vocabulary, **shape):
    """Write a Llama of random weights with a tokenizer of these texts; return the number of parameters."""
    tokenizer = train_tokenizer(texts, vocab_size=vocabulary)
    config = DecoderConfig(vocab_size=vocabulary, intermediate_size=3 * shape["hidden_size"], **shape)
    torch.manual_seed(0)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=model.initial_std(name))
    save_pretrained(model.state_dict(), config, folder)
    tokenizer.save(folder / "tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return sum(parameter.numel() for parameter in model.parameters())


def save_tasks(folder, texts, *, questions, words):
    """Write the questions, examples and two tasks over them: examples that stay, and examples drawn."""
    chance = random.Random(1)
    known = [word for text in texts for word in text.split() if word.isalpha()]

    def sentence(least, most):
        return " ".join(chance.choices(known, k=chance.randint(least, most)))

    for name, count in (("questions", questions), ("examples", 100)):
        docs = [
            {
                "question": sentence(words // 2, words * 3 // 2),
                "choices": [sentence(4, 14) for _ in range(CHOICES)],
                "label": chance.randrange(CHOICES),
            }
            for _ in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    found = {}
    for name, sampler in (("fixed", "first_n"), ("drawn", "default")):
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": "questions.jsonl", "train": "examples.jsonl"}},
            "test_split": "test",
            "fewshot_split": "train",
            "fewshot_config": {"sampler": sampler},
            "num_fewshot": SHOTS,
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_target": "label",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        found[name] = folder / f"{name}.json"
        found[name].write_text(json.dumps(task))
    return found


def asked(model, file, *, limit=None):
    """Evaluate; return seconds, and the log-likelihoods of all choices."""
    from lm_eval.evaluator import evaluate

    tasks = load_tasks([str(file)], EvaluationOptions())
    begin = clock.monotonic()
    found = evaluate(model, tasks, limit=limit, bootstrap_iters=0, log_samples=True)
    seconds = clock.monotonic() - begin
    (samples,) = found["samples"].values()
    return seconds, [float(response[0]) for one in samples for (response,) in one["resps"]]


def instant_model():
    """Return a model for lm-eval that answers at once."""
    from lm_eval.api.model import LM

    class Instant(LM):
        """Answers every request alike."""

        def loglikelihood(self, requests):
            return [(0.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests):
            return [0.0] * len(requests)

        def generate_until(self, requests):
            return [""] * len(requests)

    return Instant()


def best_batch(theirs, file, sizes, *, questions):
    """Return seconds by batch size on a few questions, and the best size."""
    found = {}
    for size in sizes:
        is_auto = size == "auto"
        theirs.batch_size_per_gpu = size if is_auto else int(size)
        theirs.batch_schedule, theirs.batch_sizes, theirs.max_batch_size = 1, {}, 16
        found[size], _ = asked(theirs, file, limit=questions)
        print(f"hf, batch {size}: {found[size]:.1f} s for {questions} questions", flush=True)
    return found, min(found, key=found.get)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--words", type=int, default=40, help="of a question, on average")
    parser.add_argument("--rounds", type=int, default=1, help="the work of one round is long already")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--threads", type=int, default=env.num_cores())
    parser.add_argument("--batches", nargs="+", default=["1", "2", "4", "8", "16", "32", "auto"])
    parser.add_argument("--tune-questions", type=int, default=8, help="to find the best batch size by")
    parser.add_argument("--block-size", type=int, default=4, help="of our cache, as penstock eval has it")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as name:
        result = measured(Path(name), chosen)
    for kind, each in result["kinds"].items():
        print(
            f"{kind}: hf {each['hf_s']:.1f} s, penstock {each['penstock_s']:.1f} s, "
            f"{each['times_as_fast']:.1f} times as fast; lm-eval alone {each['lm_eval_s']:.1f} s; "
            f"apart at most {each['largest_difference']:.1e}"
        )
    if chosen.out:
        file_result(chosen.out, "evaluate", result, packages=("torch", "lm_eval", "transformers"))


def measured(folder, chosen):
    """Return the result."""
    texts = words_of_the_library()
    (folder / "model").mkdir()
    shape = {
        "hidden_size": chosen.hidden,
        "num_hidden_layers": chosen.layers,
        "num_attention_heads": max(1, chosen.hidden // 64),
        "num_key_value_heads": max(1, chosen.hidden // 128),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    parameters = save_model(folder / "model", texts, vocabulary=chosen.vocabulary, **shape)
    files = save_tasks(folder, texts, questions=chosen.questions, words=chosen.words)
    load_tasks([str(files["fixed"])], EvaluationOptions())  # lm-eval is loaded, offline
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(str(folder / "model"), device="cpu", dtype="float32")
    theirs.disable_tqdm = True
    by_batch, best = best_batch(theirs, files["fixed"], chosen.batches, questions=chosen.tune_questions)
    if best != "auto":
        theirs.batch_size_per_gpu = int(best)
    kinds = {}
    config = EngineConfig(device="cpu", block_size=chosen.block_size)
    with LLM(folder / "model", config) as llm:
        ours = EngineModel(llm)
        times = {kind: {"hf": [], "penstock": []} for kind in files}
        apart = dict.fromkeys(files, 0.0)
        for number in range(chosen.rounds):
            for kind, file in files.items():
                llm.thread.call(lambda engine: engine.scheduler.pool.forget_idle())  # as a fresh engine
                our_s, our = asked(ours, file)
                their_s, their = asked(theirs, file)
                times[kind]["penstock"].append(our_s)
                times[kind]["hf"].append(their_s)
                apart[kind] = max(abs(a - b) for a, b in zip(our, their, strict=True))
                print(f"round {number + 1}, {kind}: hf {their_s:.1f} s, penstock {our_s:.1f} s", flush=True)
        ours.close()
    for kind, file in files.items():
        seconds = {side: statistics.median(each) for side, each in times[kind].items()}
        ratios = [a / b for a, b in zip(times[kind]["hf"], times[kind]["penstock"], strict=True)]
        kinds[kind] = {
            "hf_s": seconds["hf"],
            "penstock_s": seconds["penstock"],
            "times_as_fast": statistics.median(ratios),
            "lm_eval_s": asked(instant_model(), file)[0],
            "largest_difference": apart[kind],
            "rounds": times[kind],
        }
    return {
        "parameters": parameters,
        "vocabulary": chosen.vocabulary,
        "questions": chosen.questions,
        "choices": CHOICES,
        "shots": SHOTS,
        "threads": chosen.threads,
        "block_size": chosen.block_size,
        "hf_batch": best,
        "hf_s_by_batch": by_batch,
        "peak_anonymous_kib": memory_kib(),
        "kinds": kinds,
    }


if __name__ == "__main__":
    main()
