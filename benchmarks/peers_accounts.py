"""What a run was trained on, from its logs: for `slurm_peers.py` and `jobset_peers.py`."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slurm_peers_loop import TOKENS_A_ROW

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the set-up of the tests

from tests.launched import events_of, newest_step


@dataclass(frozen=True)
class LoopAccounts:
    """Accounts of the plain loop on two ranks (slurm_peers_loop.py)."""

    folder: Path

    def newest(self):
        """Return the newest step."""
        return next((line["step"] for line in reversed(self._lines(0)) if "step" in line), 0)

    def resumed(self):
        """Return the step that each start began from."""
        return [line["resumed"] for line in self._lines(0) if "resumed" in line]

    def tokens_repeated(self):
        """Return the tokens that were trained on more than once, of the steps that count."""
        seen = []
        for rank in (0, 1):
            steps = {}
            for line in self._lines(rank):
                if "resumed" in line:
                    steps = {step: ids for step, ids in steps.items() if step <= line["resumed"]}
                else:
                    steps[line["step"]] = line["ids"]
            seen += [number for ids in steps.values() for number in ids]
        return (len(seen) - len(set(seen))) * TOKENS_A_ROW

    def _lines(self, rank):
        path = self.folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]


@dataclass(frozen=True)
class RunAccounts:
    """Accounts of a run of Penstock, by its audit."""

    folder: Path

    def newest(self):
        """Return the newest step."""
        return newest_step(self.folder)

    def resumed(self):
        """Return the step that each start began from, as the first rank's supervisor logs it."""
        starts = [
            event["cause"]
            for event in events_of(self.folder)
            if event["event"] == "start" and ("ranks" in event or event.get("first_rank") == 0)
        ]
        return [int(cause.rpartition(" ")[2]) if "checkpoint" in cause else 0 for cause in starts]

    def tokens_repeated(self):
        """Return the tokens that were trained on more than once, of the steps that count: by the audit."""
        audit = json.loads(command("data", "audit", self.folder, "--json"))
        return (audit["num_faults"] * 12 + abs(audit["samples"] - 12 * audit["steps"])) * TOKENS_A_ROW


def command(*words, **options):
    """Run a command of Penstock; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_corpus(out):
    """Prepare a corpus of Python sources that every machine has."""
    source = Path(json.__file__).parent
    command("data", "prepare", source, "--train-tokenizer", 400, "--max-errors", 9, "--out", out)


def say(row):
    """Print a row."""
    person = "submitted again by a person" if row["submitted_by_a_person"] else "by itself"
    print(
        f"{row['peer']:<10} {row['event']:<12} {row['steps_redone']:>4} steps redone "
        f"{row['tokens_repeated']:>8} tokens repeated  {person}",
        flush=True,
    )
