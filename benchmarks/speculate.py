"""What do drafts give in tokens/s: n-grams, heads; one request and several; greedy and drawn?

    python benchmarks/speculate.py --out benchmarks/results      # about thirteen minutes on two cores
    python benchmarks/speculate.py --only forced                 # of these, three

A Llama and heads are trained here, on the sources of Python's standard library, the first for as long as
`--seconds` says, and continue files that they were not trained on. Every setting has an engine of its own
over the same weights; settings take turns, round by round. A model of minutes repeats itself more than a good
one, which flatters n-grams most: the ratios say what drafts that stand so often bring, not how often those of
a good model do. Whether the answers of a setting are those without drafts is filed beside its figures.

What drafts bring as a function of how often they stand, at a real size, is in `speculate_forced.py`.
"""

import argparse
import sysconfig
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from measuring import interleaved, median
from results_file import file_result
from speculate_forced import forced_rows

from penstock.checkpoint.hf import save_pretrained
from penstock.cli.main import main as penstock
from penstock.core import clock
from penstock.data import Loader
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request
from penstock.engine.sampling_params import Sampling
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.train.loss import next_token_loss
from penstock.train.speculator.config import SpeculatorTraining
from penstock.train.speculator.run import train_speculator
from penstock.train.speculator.writer import writer

HOLDOUT, LENGTH, ROWS = 0.05, 256, 8
SOURCES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest")


def make_corpus(folder, vocabulary):
    """Prepare sources of the standard library; return the corpus."""
    words = [str(Path(sysconfig.get_path("stdlib")) / name) for name in SOURCES]
    size = ["--train-tokenizer", str(vocabulary), "--max-errors", "9", "--out", str(folder / "corpus")]
    assert penstock(["data", "prepare", *words, *size]) == 0
    return folder / "corpus"


def rows_of(corpus, split="train"):
    """Return a loader of rows."""
    return Loader(
        {"text": corpus},
        sequence_length=LENGTH,
        global_batch_size=ROWS,
        holdout=HOLDOUT,
        split=split,
        fields=("input_ids", "labels", "cu_seqlens", "position_ids"),
        num_workers=0,
    )


def train_model(folder, corpus, *, seconds, **shape):
    """Train a Llama for so many seconds and write it as a Hugging Face folder; return the last loss."""
    torch.manual_seed(0)
    config = DecoderConfig(intermediate_size=3 * shape["hidden_size"], max_position_embeddings=1024, **shape)
    model, loader = Decoder(config), rows_of(corpus)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=model.initial_std(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    begin, step = clock.monotonic(), 0
    while step == 0 or clock.monotonic() - begin < seconds:
        batch = loader.batch_at(step)
        places = {name: batch[name] for name in ("position_ids", "cu_seqlens")}
        total = model(batch["input_ids"], **places, finish=next_token_loss(batch["labels"]))
        loss = total / (batch["labels"] >= 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    tokenizer = (corpus / "tokenizer.json").read_text()
    save_pretrained(model.state_dict(), config, folder, extra_files={"tokenizer.json": tokenizer})
    print(f"{folder.name}: {step} steps, loss {float(loss.detach()):.2f}", flush=True)
    return float(loss.detach())


def train_heads(folder, model, corpus, *, steps):
    """Train heads for a model; return how often their drafts stand."""
    training = SpeculatorTraining(
        steps=steps, sequence_length=LENGTH, batch_size=ROWS, own_tokens=64, holdout=HOLDOUT
    )
    from penstock.engine.model_runner.open import open_model

    base, _ = open_model(model)
    engine = build_engine(model, EngineConfig(max_context=128, max_sequences=ROWS))
    write = writer(engine, num_tokens=training.own_tokens)
    accepted = train_speculator(base.requires_grad_(False), str(corpus), folder, training, write=write)
    engine.close()
    print(f"heads: {accepted}", flush=True)
    return asdict(accepted)


def requests(corpus, *, number, tokens, temperature):
    """Return continuations of held-out files."""
    batch = rows_of(corpus, split="heldout").batch_at(0)["input_ids"]
    return [
        Request(
            prompt=tuple(batch[i % len(batch), 8 * (i // len(batch)) :][:64].tolist()),
            max_tokens=tokens,
            sampling=Sampling(temperature=temperature, seed=i),
        )
        for i in range(number)
    ]


def answered(engine, asked):
    """Answer requests; return their tokens in the order of the requests."""
    told = {engine.add(request): [] for request in asked}
    while engine.has_work:
        for piece in engine.step():
            told[piece.request_id] += piece.token_ids
    return list(told.values())


def measure(engines, asked, *, rounds):
    """Return, per setting, tokens/s and how drafts fared; the answers must be the same in all."""
    answers, before = {}, {name: counted(engine) for name, engine in engines.items()}

    def work(name):
        answers[name] = answered(engines[name], asked)
        return sum(map(len, answers[name]))

    rates = interleaved({name: lambda name=name: work(name) for name in engines}, rounds=rounds)
    equal = {name: answers[name] == answers["off"] for name in engines}
    rows = {}
    for name, engine in engines.items():
        steps, drawn, drafts, stood = (b - a for a, b in zip(before[name], counted(engine), strict=True))
        rows[name] = {
            "tokens_per_s": round(median(rates[name]["per_s"]), 1),
            "times_off": round(median(rates[name]["per_s"]) / median(rates["off"]["per_s"]), 2),
            "tokens_per_step_and_request": round(drawn / steps / len(asked), 2),
            "drafts_stood": round(stood / drafts, 3) if drafts else None,
            "same_answers": equal[name],
        }
    return rows


def counted(engine):
    """Return steps, tokens drawn, drafts, and drafts that stood."""
    counts = engine.stats().counts
    return counts.steps, counts.sampled, counts.drafts, counts.drafts_accepted


def rows_with(folder, corpus, number, options):
    """Yield what was measured with so many requests at once."""
    sources = {"off": "off", "ngram": "ngram", "heads": folder / "heads"}
    config = {"max_context": 64 + options.tokens, "max_sequences": number}
    engines = {
        source: build_engine(folder / "model", EngineConfig(drafts=str(drafts), **config))
        for source, drafts in sources.items()
    }
    for temperature in (0.0, 0.8):
        asked = requests(corpus, number=number, tokens=options.tokens, temperature=temperature)
        for source, row in measure(engines, asked, rounds=options.rounds).items():
            print(
                row := {"requests": number, "temperature": temperature, "drafts": source, **row}, flush=True
            )
            yield row
    for engine in engines.values():
        engine.close()


def trained(folder, options):
    """Train and measure; return settings, the loss, how often drafts of heads stand, and rows."""
    corpus = make_corpus(folder, options.vocabulary)
    shape = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "num_attention_heads": 4}
    loss = train_model(
        folder / "model", corpus, seconds=options.seconds, vocab_size=options.vocabulary, **shape
    )
    heads = train_heads(folder / "heads", folder / "model", corpus, steps=options.tune_steps)
    rows = [row for number in options.requests for row in rows_with(folder, corpus, number, options)]
    shapes = {key: getattr(options, key) for key in ("hidden", "layers", "vocabulary", "tokens", "seconds")}
    return {"settings": shapes, "loss": loss, "heads": heads, "rows": rows}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="training of the model")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--tune-steps", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="answered at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder to file the result in")
    parser.add_argument("--only", choices=("trained", "forced"), help="one half of the benchmark")
    parser.add_argument("--forced-model", default="125m", help="its shape, as of benchmarks/serve.py")
    parser.add_argument("--forced-tokens", type=int, default=48)
    parser.add_argument("--forced-requests", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    result = {}
    with tempfile.TemporaryDirectory() as name:
        if options.only != "forced":
            result |= trained(Path(name), options)
        if options.only != "trained":
            sizes = {"requests": options.forced_requests, "tokens": options.forced_tokens}
            rows = forced_rows(name, options.forced_model, rounds=min(3, options.rounds), **sizes)
            result["forced"] = {"model": options.forced_model, **sizes, "rows": list(rows)}
    if options.out:
        file_result(options.out, "speculate", result, packages=("torch",))


if __name__ == "__main__":
    main()
