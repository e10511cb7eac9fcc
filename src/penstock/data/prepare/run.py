"""Prepare a corpus: plan, tokenizer, shards, manifest, in this order, each step durable.

A corpus to be streamed gets its manifest with its first part, and a new one with each further part; a reader
sees the old one or the new one.

A run that is killed and started again with the same arguments yields the same bytes as one that
never stopped: the plan fixes the inputs, shards are cut by tokens, and the journal says after which
record each shard ended. Nothing in the result depends on the clock, the number of cores, or on how
often the run was stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.core.errors import InputError, UsageError
from penstock.core.files import exclusive
from penstock.data.manifest import Manifest, load_manifest, save_manifest
from penstock.data.prepare import folder, journal
from penstock.data.prepare.documents import ReadOptions
from penstock.data.prepare.fill import dtype_of, fill_shards
from penstock.data.prepare.inputs import Selection, Skipped, find_inputs
from penstock.data.prepare.journal import Entry
from penstock.data.prepare.parts import Growth
from penstock.data.prepare.plan import Plan, PrepareConfig, make_plan
from penstock.data.prepare.progress import OnProgress
from penstock.data.prepare.sample import settle_tokenizer
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was prepared."""

    manifest: Manifest
    """The corpus."""
    rejected: dict[str, int]
    """Rejected inputs by kind; listed in rejected.jsonl."""
    skipped: Skipped
    """Entries of folders that were passed over, by reason."""
    num_inputs: int
    """Input files."""
    input_bytes: int
    """Their size."""
    already_complete: bool
    """The folder was finished before; nothing was done."""


def prepare(
    paths: Sequence[str],
    out: Path,
    *,
    config: PrepareConfig,
    selection: Selection | None = None,
    restart: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> Summary:
    """Turn files of text into a corpus folder, or go on where an earlier run stopped.

    Args:
        paths: files and folders, in reading order.
        restart: delete what the folder holds of any corpus first.
        on_progress: called now and then, from this thread.

    Raises:
        UsageError: nothing to read, or options that do not fit.
        InputError: too many rejected inputs, or an input that changed meanwhile.
        CorpusChanged: the folder holds the work of other arguments.
        RunLocked: another process is preparing this folder.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", fix="Name a folder; it is made if it does not exist.")
    if any(Path(path).is_dir() and out.is_dir() and out.samefile(path) for path in paths):
        raise UsageError(f"--out {out} is also an input", fix="Choose another folder for the corpus.")
    given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    selection = selection or Selection()
    files, skipped = find_inputs(paths, replace(selection, never=selection.never or out))
    plan = make_plan(config, files, tokenizer=given.fingerprint if given else None)
    with exclusive(out, purpose="data prepare"):
        if restart:
            folder.clear(out, keep=config.tokenizer)
        state = folder.settle(out, plan)
        if state != "finished":
            _work(out, plan, config=config, given=given, on_progress=on_progress)
        (out / journal.FILE).unlink(missing_ok=True)
        return Summary(
            manifest=load_manifest(out),
            rejected=folder.rejections_by_kind(out),
            skipped=skipped,
            num_inputs=len(files),
            input_bytes=plan.input_bytes,
            already_complete=state == "finished",
        )


def _work(
    out: Path, plan: Plan, *, config: PrepareConfig, given: Tokenizer | None, on_progress: OnProgress
) -> None:
    options = ReadOptions(text_column=config.text_column, max_document_bytes=config.max_document_bytes)
    tokenizer = settle_tokenizer(out, plan, options=options, given=given, on_progress=on_progress)
    growth = config.growth
    fill_shards(
        out,
        plan,
        options=options,
        tokenizer=tokenizer,
        limit_of=growth.shard_limit if growth else lambda _: config.shard_tokens,
        on_progress=on_progress,
        on_entries=partial(_commit, out, tokenizer=tokenizer, growth=growth, max_errors=config.max_errors),
    )


def _commit(
    out: Path, entries: Sequence[Entry], *, tokenizer: Tokenizer, growth: Growth | None, max_errors: int
) -> None:
    """Write the manifest where the last entry ends a part, or the corpus; a function of the journal alone."""
    last, shards = entries[-1], tuple(entry.shard for entry in entries if entry.shard)
    parts = growth.part_ends(len(shards), done=last.done) if growth else ()
    if not last.done and (not parts or parts[-1] != len(shards)):
        return
    _judge(out, last, max_errors=max_errors, any_document=bool(shards))
    manifest = Manifest(
        format="arrow",
        dtype=dtype_of(tokenizer),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer=tokenizer.fingerprint,
        text_bytes=last.text_bytes,
        rejected=sum(last.rejected.values()),
        shards=shards,
        parts=parts,
        streamed_parts=(len(parts) if last.done else 0) if growth else None,
    )
    save_manifest(out, manifest)


def _judge(out: Path, last: Entry, *, max_errors: int, any_document: bool) -> None:
    """Refuse a corpus with no documents, or with more rejections than the user accepts."""
    total, listed = sum(last.rejected.values()), out / journal.REJECTED_FILE
    kinds = ", ".join(f"{kind.replace('_', ' ')}: {count:,}" for kind, count in sorted(last.rejected.items()))
    if not any_document:
        what = f"No document was accepted; rejected: {total:,} ({kinds or 'the inputs are empty'})"
        raise InputError(what, fix=f"See {listed}, then correct the inputs and use --restart.")
    if total > max_errors:
        raise InputError(
            f"Rejected inputs: {total:,} ({kinds}), but --max-errors is {max_errors}; {listed} lists them",
            fix=f"Correct them and use --restart, or run the same command with --max-errors {total} to leave "
            "them out; it finishes at once from the work already done.",
        )
