"""Does tuning teach the form of answers? Questions that a base cannot answer, before and after.

    python benchmarks/tune_learns.py --out benchmarks/results      # some minutes on two cores

A base is trained here on a small language of facts, sums and notes (penstock.testing.questions), as plain
text. It is then tuned on conversations about seven tenths of them: all weights, an adapter, and an adapter
over a base of 4 bits. Each is asked the other three tenths, greedily, in the chat template; an answer counts
if it is right to the character. The text stays part of the mixture, so that what was read is not forgotten
while the form is learned.

Less than 5% before and more than 95% after are aimed at, and at most 2 points between the two adapters; exit
code 1 if one is missed.

Everything is done by commands of Penstock in processes of their own; the time is that of all of it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from results_file import file_result

from penstock import LLM, EngineConfig, Params, Sampling
from penstock.core import clock
from penstock.testing.questions import Language, write

BASE = """
compute = "float32"
[run]
dir = "@/base-run"
steps = {steps}
[model]
hidden_size = {hidden}
intermediate_size = {inner}
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 2
tie_word_embeddings = true
max_position_embeddings = 256
[data]
sequence_length = 128
global_batch_size = 16
[data.corpora.text]
path = "@/corpus"
[optim]
learning_rate = 4e-3
[schedule]
rule = "wsd"
warmup_steps = 20
decay_steps = {decay}
final_share = 0.02
[checkpoint]
every = 100000
"""
TUNE = """
compute = "float32"
[run]
dir = "@/{name}"
start_from = "@/base"
steps = {steps}
[tune]
{tune}
[data]
sequence_length = 128
global_batch_size = 16
packing = "whole"
overlong = "drop"
[data.corpora.chats]
path = "@/chats"
weight = 0.5
[data.corpora.text]
path = "@/corpus"
weight = 0.5
[optim]
learning_rate = {rate}
weight_decay = 0.0
[schedule]
rule = "cosine"
warmup_steps = 10
[checkpoint]
every = 100000
"""
INT4 = "lora, int4 base"
METHODS = {
    "full": ('method = "full"', 1e-3, "stored"),
    "lora": ('method = "lora"\nrank = 16', 5e-3, "stored"),
    INT4: ('method = "lora"\nrank = 16\nbase = "int4"', 5e-3, "int4"),
}
"""Setting -> [tune], learning rate, format of the weights that are served."""
MAX_BEFORE, MIN_AFTER, MAX_APART = 0.05, 0.95, 0.02
"""Shares of right answers: of the base, of a tuned model, and between adapters over 4 bits and over none."""


def penstock(*words):
    """Run a command; its output is shown if it fails."""
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}"


def make_base(folder, shape):
    """Train a base on the language's text and write it as a Hugging Face folder."""
    penstock("data", "prepare", folder / "text", "--train-tokenizer", 500, "--out", folder / "corpus")
    (folder / "base.toml").write_text(BASE.format(**shape).replace("@", str(folder)))
    penstock("train", folder / "base.toml")
    penstock("export", folder / "base-run", "--out", folder / "base", "--dtype", "fp32")
    shutil.copy(folder / "chat_template.jinja", folder / "base")
    chats = ("--chat", "--tokenizer", folder / "base", "--out", folder / "chats")
    penstock("data", "prepare", folder / "chats.jsonl", *chats)


def tune(folder, name, steps):
    """Tune the base; return the folder of the run."""
    settings, rate, _ = METHODS[name]
    run = name.replace(", ", "-").replace(" ", "-")
    recipe = folder / f"{run}.toml"
    text = TUNE.format(name=run, steps=steps, tune=settings, rate=rate)
    recipe.write_text(text.replace("@", str(folder)))
    penstock("tune", recipe)
    return folder / run


def right(model, questions, *, weights="stored"):
    """Return the share of right answers by kind of question, and of all."""
    params = Params(sampling=Sampling(temperature=0.0), max_tokens=40)
    with LLM(model, EngineConfig(weights=weights)) as llm:
        asked = [llm.chat_request(question.messages()[:1], params) for question in questions]
        answers = [out.text.strip() for out in llm.collect(asked)]
    kinds = sorted({question.kind for question in questions})
    found = {}
    for kind in [*kinds, "all"]:
        hits = [
            answer == question.answer
            for answer, question in zip(answers, questions, strict=True)
            if kind in (question.kind, "all")
        ]
        found[kind] = sum(hits) / len(hits)
    return found


def missed(found):
    """Return which aims the shares of right answers miss."""
    shares = {name: each["all"] for name, each in found.items()}
    said = [
        f"{name} has {share:.1%} right, and more than {MIN_AFTER:.0%} is aimed at"
        for name, share in shares.items()
        if name != "base" and share <= MIN_AFTER
    ]
    if shares["base"] >= MAX_BEFORE:
        said.append(f"the base has {shares['base']:.1%} right, and less than {MAX_BEFORE:.0%} is aimed at")
    if {"lora", INT4} <= shares.keys() and abs(shares["lora"] - shares[INT4]) > MAX_APART:
        said.append(
            f"{INT4} has {shares[INT4]:.1%} right, more than {MAX_APART:.0%} from {shares['lora']:.1%}"
        )
    return said


def main():
    """Measure, print and file; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--base-steps", type=int, default=900)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="*", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--no-aims", action="store_true", help="exit with 0 whatever is answered")
    parser.add_argument("--work", type=Path, help="folder to work in, and to keep: its base is used again")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begin = clock.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.work or Path(temporary)).resolve()
        language = Language()
        is_new = not (folder / "base" / "chat_template.jinja").exists()
        _, questions = language.questions(share=0.7)
        steps = arguments.base_steps
        shape = {"hidden": arguments.hidden, "inner": 3 * arguments.hidden, "layers": arguments.layers}
        if is_new:
            write(folder, language, documents=arguments.documents)
            make_base(folder, {**shape, "steps": steps, "decay": steps * 2 // 5})
        found = {"base": right(folder / "base", questions)}
        seconds = {"base": clock.monotonic() - begin}
        for name in arguments.only:
            since = clock.monotonic()
            run = tune(folder, name, arguments.steps)
            found[name] = right(run, questions, weights=METHODS[name][2])
            seconds[name] = clock.monotonic() - since
    print(f"{'':<16}" + "".join(f"{kind:>8}" for kind in found["base"]) + f"{'seconds':>10}")
    for name, shares in found.items():
        row = "".join(f"{share:>8.1%}" for share in shares.values())
        print(f"{name:<16}{row}{seconds[name]:>10.0f}")
    result = {
        "questions": len(questions),
        "right": found,
        "seconds": {**seconds, "all": clock.monotonic() - begin},
        "settings": {name: value for name, value in vars(arguments).items() if name not in ("work", "out")},
    }
    if arguments.out:
        file_result(arguments.out, "tune_learns", result, packages=("torch",))
    if said := [] if arguments.no_aims else missed(found):
        print(f"missed: {'; '.join(said)}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
