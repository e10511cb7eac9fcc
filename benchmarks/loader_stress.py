"""Does a stream of a very large number of tokens stay exact, through kills, rescales and new mixtures?

    python benchmarks/loader_stress.py --tokens 2G                      # a minute: the size for CI
    python benchmarks/loader_stress.py --tokens 2T --out benchmarks/results
    python benchmarks/loader_stress.py --tokens 2G --storage-faults 0.05  # behind a web server that fails
    python benchmarks/loader_stress.py --tokens 2G --corpus DIR_OR_URL  # corpora written with --write DIR

Three corpora, a fourth that joins half-way, 256 million tokens together, are streamed epoch after epoch
from the page cache by a process that is killed (SIGKILL) at random instants and started again from its
last save on another number of ranks, with other worker threads and another batch size, while the weights
change. Every token is its own identity (hashed_tokens.py); every complete epoch of every corpus is compared
with the corpus. Tokens of the epochs still open at the end are counted apart, as not proven. With --out, a
run that is cut off leaves what it did until then, in a file that says it is unfinished.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
from pathlib import Path

import corpora
import numpy as np
from hashed_tokens import checksums, corpus_tokens
from results_file import file_result
from stress_stream import Job, stream

from penstock.core import clock
from penstock.core.units import duration, parse_count, si

SHARES = {"web": 8, "code": 4, "wiki": 3, "books": 1}
LENGTH = 4096
SAY_EVERY_S = 30.0
RANKS, BATCHES, WORKERS = (1, 2, 3, 4, 6, 8), (192, 240, 384), (0, 0, 0, 1, 2)


def write_corpora(folder, num_tokens):
    """Write the four corpora into a folder, each a whole number of rows."""
    for index, (name, share) in enumerate(SHARES.items()):
        tokens = _tokens_of(share, num_tokens)
        lengths = corpora.lognormal_lengths(tokens, seed=index)
        corpora.write(
            folder / name,
            lengths,
            corpus_tokens(index),
            dtype="uint32",
            vocab_size=2**32,
            shard_tokens=max(tokens // 4, LENGTH),
        )


def _tokens_of(share, num_tokens):
    return max(1, num_tokens * share // sum(SHARES.values()) // LENGTH) * LENGTH


def make_plan(target, changes, *, seed):
    """Return the mixtures of the run: (from this many tokens on, weights), `changes` after the first."""
    rng = np.random.default_rng(seed)
    names, plan = list(SHARES), []
    for number in range(changes + 1):
        present = names if number > changes // 2 else names[:-1]
        weights = dict(zip(present, rng.dirichlet(np.ones(len(present))).round(4).tolist(), strict=True))
        if number == 0:
            weights = {name: float(SHARES[name]) for name in present}
        plan.append((target * number // (changes + 1), {name: weights[name] + 0.001 for name in present}))
    return plan


def expected_of(num_tokens):
    """Return what the ledger expects of an epoch of each corpus."""
    sizes = [_tokens_of(share, num_tokens) for share in SHARES.values()]
    return [(size // LENGTH, *checksums(index, size)) for index, size in enumerate(sizes)]


def run(arguments, folder, location, *, expected, storage=None):
    """Stream to the target through all faults; return the account of it."""
    chance = random.Random(arguments.seed)
    plan = make_plan(arguments.tokens, arguments.changes, seed=arguments.seed)
    watch = Watch(arguments, folder, storage)
    context, ranks = multiprocessing.get_context("spawn"), 0
    while True:
        before, ranks = ranks, chance.choice([number for number in RANKS if number != ranks])
        watch.faults["rescales"] += bool(before)
        job = Job(
            folder=folder,
            corpora={name: f"{location}/{name}" for name in SHARES},
            expected=expected,
            target_tokens=arguments.tokens,
            plan=plan,
            length=LENGTH,
            batch=chance.choice(BATCHES),
            ranks=ranks,
            workers=chance.choice(WORKERS),
            packing=arguments.packing,
            save_every=arguments.save_every,
        )
        life = context.Process(target=stream, args=(job,), daemon=True)
        life.start()
        watch.until_end(life, seconds=arguments.kill_every * (0.25 + chance.expovariate(1.33)))
        if life.exitcode is None:
            life.kill()
            life.join()
            watch.faults["kills"] += 1
            if storage and chance.random() < 0.3:
                storage.lose_cache()
        elif life.exitcode:
            raise SystemExit(f"The stream failed with exit code {life.exitcode}: see above.")
        else:
            watch.clear()
            return watch.account()


class Watch:
    """Says how far a run is, and files what it did so far: one that is cut off leaves an account."""

    def __init__(self, arguments, folder, storage):
        self.faults = {"kills": 0, "rescales": 0}
        self._arguments, self._folder, self._storage = arguments, folder, storage
        self._began = clock.monotonic()
        self._filed = []

    def until_end(self, life, *, seconds):
        """Wait for a life to end, at most so long; speak now and then, and at the end."""
        end = clock.monotonic() + seconds
        while life.exitcode is None and (left := end - clock.monotonic()) > 0:
            life.join(min(left, SAY_EVERY_S))
            if (self._folder / "save.json").exists():
                self._say()

    def account(self):
        """Return what was done until now."""
        return summarize(
            self._folder,
            self.faults | (dict(self._storage.counts) if self._storage else {}),
            clock.monotonic() - self._began,
            plan=make_plan(self._arguments.tokens, self._arguments.changes, seed=self._arguments.seed),
        )

    def _say(self):
        result, target = self.account(), self._arguments.tokens
        done, rate = result["tokens"], result["tokens_per_s"]
        left = duration(max(0, target - done) / max(rate, 1))
        print(
            f"{si(done)} of {si(target)} tokens, {si(rate)} a second, {self.faults['kills']} kills, "
            f"{duration(result['wall_s'])} passed, {left} to go",
            flush=True,
        )
        if self._arguments.out:
            self._filed = file(self._arguments, {"finished": False, **result}, suffix="_unfinished")

    def clear(self):
        """Remove what was filed before the end."""
        for path in self._filed:
            path.unlink()


def summarize(folder, faults, wall_s, *, plan):
    """Return the account of a run up to its last save."""
    saved = json.loads((folder / "save.json").read_text())
    log = _log_of(folder)
    ledger = saved["ledger"]
    changes = saved["changes"] - 1
    unproven = sum(rows for rows, _, _ in ledger["open"].values()) * LENGTH
    return {
        "tokens": saved["tokens"],
        "tokens_proven": saved["tokens"] - unproven,
        "tokens_in_open_epochs": unproven,
        "epochs_proven": ledger["complete"],
        "epochs_wrong": ledger["wrong"],
        "steps_with_other_samples": ledger["steps_wrong"],
        "wall_s": round(wall_s, 1),
        "tokens_per_s": round(saved["tokens"] / wall_s),
        "faults_survived": {
            **faults,
            "weight_changes": changes,
            "corpora_added": int(len(plan[changes][1]) == len(SHARES)),
        },
        "peak_memory_mib": round(max(line["anonymous_kib"] for line in log) / 1024),
        "largest_state_bytes": max(line["state_bytes"] for line in log),
    }


def steady_memory(arguments, folder, location, *, expected):
    """Stream on one rank with no faults; return anonymous KiB at each of twelve points.

    Apart from the run with faults, where lives differ in ranks, threads and mixture, and so in memory.
    """
    tokens = max(arguments.tokens // 100, 12 * 192 * LENGTH)
    job = Job(
        folder=folder / "steady",
        corpora={name: f"{location}/{name}" for name in SHARES},
        expected=expected,
        target_tokens=tokens,
        plan=make_plan(tokens, 0, seed=0),
        length=LENGTH,
        batch=192,
        ranks=1,
        workers=0,
        packing=arguments.packing,
        save_every=tokens // 12,
    )
    job.folder.mkdir()
    life = multiprocessing.get_context("spawn").Process(target=stream, args=(job,))
    life.start()
    life.join()
    return [line["anonymous_kib"] for line in _log_of(job.folder)]


def _log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def report(result):
    """Print the account; exit with 1 if a token was lost or repeated."""
    faults = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in result["faults_survived"].items()
    )
    bad = len(result["epochs_wrong"]) + result["steps_with_other_samples"]
    print(f"tokens streamed    {result['tokens']:,} in {duration(result['wall_s'])}")
    print(f"                   {si(result['tokens_per_s'])} a second, verification and faults included")
    print(f"tokens proven      {result['tokens_proven']:,} in {result['epochs_proven']:,} complete epochs")
    print(f"lost or repeated   {'0 and 0' if not bad else result['epochs_wrong'] or 'steps differ'}")
    print(f"faults survived    {faults}")
    print(f"largest state      {result['largest_state_bytes']:,} bytes")
    steady = result["steady_memory_kib"]
    print(f"memory             at most {result['peak_memory_mib']} MiB in any life; ", end="")
    print(f"without faults {steady[len(steady) // 3]:,} KiB after a third, {steady[-1]:,} at the end")
    return bad


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=parse_count, default=parse_count("2G"), help="tokens to stream")
    parser.add_argument("--corpus-tokens", type=parse_count, default=256_000_000, help="of all four together")
    parser.add_argument("--corpus", help="folder or URL under which the corpora already are")
    parser.add_argument(
        "--storage-faults", type=float, default=0.0, help="share of requests that fail, over http"
    )
    parser.add_argument("--write", type=Path, help="write the corpora here and stop")
    parser.add_argument("--packing", default="concat")
    parser.add_argument("--changes", type=int, default=24, help="changes of the mixture over the run")
    parser.add_argument("--kill-every", type=float, default=30.0, help="seconds between kills, on average")
    parser.add_argument("--save-every", type=parse_count, default=200_000_000, help="tokens between saves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON")
    arguments = parser.parse_args()
    if arguments.write:
        write_corpora(arguments.write, arguments.corpus_tokens)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not arguments.corpus:
            write_corpora(folder, arguments.corpus_tokens)
        location = arguments.corpus or str(folder)
        expected = expected_of(arguments.corpus_tokens)
        if arguments.storage_faults:
            from bad_storage import badly_served  # which needs the checkout's tests

            with badly_served(folder, SHARES, share=arguments.storage_faults, seed=arguments.seed) as storage:
                result = run(arguments, folder, storage.url, expected=expected, storage=storage)
        else:
            result = run(arguments, folder, location, expected=expected)
        result["steady_memory_kib"] = steady_memory(arguments, folder, location, expected=expected)
    bad = report(result)
    if arguments.out:
        file(arguments, {"finished": True, **result})
    raise SystemExit(1 if bad else 0)


def file(arguments, result, *, suffix=""):
    """File a result; one that has a suffix is not worth a word."""
    name = ("loader_stress_storage" if arguments.storage_faults else "loader_stress") + suffix
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "write", "corpus")}
    return file_result(arguments.out, name, {"settings": settings, **result}, announce=not suffix)


if __name__ == "__main__":
    main()
