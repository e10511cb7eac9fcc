"""Prepare a corpus: plan, tokenizer, shards, manifest, in this order, each step durable.

A streamed corpus gets its manifest with its first part, and a new one with each further part; a reader sees
the old one or the new one.

A run that is killed and started again with the same arguments yields the same bytes as an uninterrupted one:
the plan fixes the inputs, shards are cut by tokens, and the journal records the last record of each shard.
The result does not depend on the clock, the number of cores, or the number of interruptions.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.core.errors import InputError, UsageError
from penstock.core.files import exclusive
from penstock.data.corpus.manifest import Manifest, load_manifest, save_manifest
from penstock.data.prepare import journal
from penstock.data.prepare import journal as folder
from penstock.data.prepare.chat_records import FIELDS as CHAT_FIELDS
from penstock.data.prepare.chat_setup import ChatSetup, chat_setup
from penstock.data.prepare.chat_tokens import columns_of_kind
from penstock.data.prepare.columnar import TABULAR
from penstock.data.prepare.documents import NOT_ERRORS, ReadOptions, check_text_column
from penstock.data.prepare.fill import dtype_of, fill_shards
from penstock.data.prepare.html import check_extractor, is_named_html
from penstock.data.prepare.inputs import Selection, Skipped, find_inputs, shown
from penstock.data.prepare.journal import JournalEntry
from penstock.data.prepare.plan import (
    Growth,
    InputFile,
    OnProgress,
    PreparationPlan,
    PrepareConfig,
    Progress,
    make_plan,
)
from penstock.data.prepare.train_tokenizer import settle_tokenizer
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Result of a preparation."""

    manifest: Manifest
    """Manifest of the corpus."""
    rejected: dict[str, int]
    """Rejected inputs by kind; listed in rejected.jsonl."""
    skipped: Skipped
    """Omitted entries of folders, by reason."""
    num_inputs: int
    """Number of input files."""
    input_bytes: int
    """Size of the input files in bytes."""
    already_complete: bool
    """True if the folder was already finished and nothing was done."""


def prepare(
    paths: Sequence[str],
    out: Path,
    *,
    config: PrepareConfig,
    selection: Selection | None = None,
    restart: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> Summary:
    """Prepare a corpus folder from text files, or continue an interrupted run.

    If it fails before anything is finished that a second start could use, no file of it is left.

    Args:
        paths: files and folders, in reading order.
        restart: first delete any corpus in the folder.
        on_progress: called regularly from this thread.

    Raises:
        UsageError: there is nothing to read, or options are inconsistent.
        InputError: too many inputs were rejected, or an input changed meanwhile.
        CorpusChanged: the folder contains work of other arguments.
        RunLocked: another process is preparing this folder.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", fix="Name a folder; it is created if it does not exist.")
    if any(Path(path).is_dir() and out.is_dir() and out.samefile(path) for path in paths):
        raise UsageError(f"--out {out} is also an input", fix="Choose another folder for the corpus.")
    given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    selection = selection or Selection()
    columns = () if config.chat is None else (*CHAT_FIELDS, *config.chat.field_names)
    selection = replace(selection, never=selection.never or out, chat_columns=columns)
    on_progress(Progress(stage="find the inputs"))
    files, skipped = find_inputs(paths, selection)
    chat = None
    if config.chat is not None:
        assert config.tokenizer is not None
        on_progress(Progress(stage="look at the conversations"))
        chat = chat_setup(config.chat, files, tokenizer=config.tokenizer, zstd_long=config.zstd_long)
    else:
        _check_texts(files, config)
    plan = make_plan(
        config,
        files,
        tokenizer=given.fingerprint if given else None,
        chat=chat.options if chat else None,
    )
    with folder.nothing_left(out), exclusive(out, purpose="data prepare"):
        if restart:
            folder.clear(out, keep=config.tokenizer)
        state = folder.settle(out, plan)
        if state != "finished":
            _work(out, plan, config=config, given=given, chat=chat, on_progress=on_progress)
        (out / journal.FILE).unlink(missing_ok=True)
        return Summary(
            manifest=load_manifest(out),
            rejected=folder.rejections_by_kind(out),
            skipped=skipped,
            num_inputs=len(files),
            input_bytes=plan.input_bytes,
            already_complete=state == "finished",
        )


def _check_texts(files: Sequence[InputFile], config: PrepareConfig) -> None:
    """Refuse inputs without the column of texts, or pages that cannot be read, before anything is written."""
    if any(file.kind in TABULAR for file in files):
        check_text_column(files, config.text_column)
    if config.html == "extract" and (page := next((f for f in files if is_named_html(f.path)), None)):
        check_extractor(shown(page.path))


def _work(
    out: Path,
    plan: PreparationPlan,
    *,
    config: PrepareConfig,
    given: Tokenizer | None,
    chat: ChatSetup | None,
    on_progress: OnProgress,
) -> None:
    options = ReadOptions(
        text_column=config.text_column,
        max_document_bytes=config.max_document_bytes,
        zstd_long=config.zstd_long,
        html=config.html,
        chat=chat is not None,
        fields=chat.config.field_names if chat else {},
    )
    tokenizer = settle_tokenizer(out, plan, options=options, given=given, on_progress=on_progress)
    if chat is not None:
        chat.store(out)
    growth = config.growth
    fill_shards(
        out,
        plan,
        options=options,
        tokenizer=tokenizer,
        limit_of=growth.shard_limit if growth else lambda _: config.shard_tokens,
        on_progress=on_progress,
        on_entries=partial(
            _commit, out, tokenizer=tokenizer, growth=growth, max_errors=config.max_errors, chat=chat
        ),
        chats=chat.opener(tokenizer) if chat else None,
        columns=columns_of_kind(chat.kind) if chat else (),
    )


def _commit(
    out: Path,
    entries: Sequence[JournalEntry],
    *,
    tokenizer: Tokenizer,
    growth: Growth | None,
    max_errors: int,
    chat: ChatSetup | None,
) -> None:
    """Write the manifest if the last entry ends a part or the corpus; a function of the journal alone."""
    last, shards = entries[-1], tuple(entry.shard for entry in entries if entry.shard)
    parts = growth.part_ends(len(shards), done=last.done) if growth else ()
    if not last.done and (not parts or parts[-1] != len(shards)):
        return
    _judge(out, last, max_errors=max_errors, any_document=bool(shards))
    manifest = Manifest(
        format="arrow",
        dtype=dtype_of(tokenizer),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id if chat is None else None,  # the template ends each turn
        tokenizer=tokenizer.fingerprint,
        text_bytes=last.text_bytes,
        rejected=sum(last.rejected.values()),
        columns=columns_of_kind(chat.kind) if chat else (),
        chat=chat.origin(last.counts) if chat else None,
        shards=shards,
        parts=parts,
        streamed_parts=(len(parts) if last.done else 0) if growth else None,
    )
    save_manifest(out, manifest)


def _judge(out: Path, last: JournalEntry, *, max_errors: int, any_document: bool) -> None:
    """Refuse a corpus without documents, or with more rejections (empty records aside) than tolerated."""
    listed = out / journal.REJECTED_FILE
    wrong = {
        k: count for k, count in sorted(last.rejected.items()) if not any_document or k not in NOT_ERRORS
    }
    total = sum(wrong.values())
    kinds = ", ".join(f"{kind.replace('_', ' ')}: {count:,}" for kind, count in wrong.items())
    if not any_document:
        what = f"No document was accepted; rejected: {total:,} ({kinds or 'the inputs are empty'})"
        column = (
            " or name the column of the documents with --text-column,"
            if "missing_field" in last.rejected
            else ""
        )
        fix = f"See {listed}, then correct the inputs,{column} and use --restart.{_about_length(wrong)}"
        raise InputError(f"{what}{_first_of(listed)}", fix=fix)
    if total > max_errors:
        raise InputError(
            f"Rejected inputs: {total:,} ({kinds}), but --max-errors is {max_errors}; {listed} lists them"
            f"{_first_of(listed)}",
            fix=f"Correct them and use --restart, or run the same command with --max-errors {total} to leave "
            f"them out; it finishes at once from the work already done.{_about_length(wrong)}",
        )


def _about_length(wrong: Collection[str]) -> str:
    """Return the options for conversations that are too long, if some are."""
    if "over_long" not in wrong:
        return ""
    return (
        " With --restart, --too-long drop leaves out conversations above --max-tokens, and --too-long cut "
        "keeps their beginning."
    )


def _first_of(listed: Path) -> str:
    """Return the first rejection that is not an empty record, for the message."""
    with listed.open("rb") as lines:
        row = next((found for line in lines if (found := json.loads(line))["kind"] not in NOT_ERRORS), None)
    if row is None:
        return ""
    place = next((f", {unit} {row[unit]}" for unit in ("line", "row") if unit in row), "")
    return f"; the first is {row['source']}{place}: {row['reason']}"
