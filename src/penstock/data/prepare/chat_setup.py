"""Set-up of a preparation of conversations: their kind, the template, and what the plan records of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from penstock.core import config as configs
from penstock.core.config import load_json
from penstock.core.errors import InputError, UsageError
from penstock.core.files import write_atomic
from penstock.data.corpus.manifest import ChatOrigin
from penstock.data.prepare.byte_streams import ZSTD_LONG
from penstock.data.prepare.chat_records import FORMS, ChatKind, kind_of_chat
from penstock.data.prepare.chat_tokens import ChatEncoder
from penstock.data.prepare.documents import RawChat, ReadOptions, Rejection, read_records
from penstock.data.prepare.inputs import is_json, shown
from penstock.data.prepare.plan import ChatConfig, InputFile
from penstock.text.chat_template import TEMPLATE_FILES, ChatTemplate, load_template, read_template
from penstock.text.tokenizer import Tokenizer

_PEEKED = 1000  # records looked at to find out what they are


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSetup:
    """Everything that turns the records of a preparation into tokens."""

    config: ChatConfig
    kind: ChatKind
    """Kind of the records."""
    date: str
    """Day that the template receives as today's, YYYY-MM-DD."""
    template: ChatTemplate
    """Template that writes the conversations: `config.template` if it is given, else the tokenizer's."""
    folder: Path
    """Folder of the tokenizer, with its own template if it has one."""

    @property
    def options(self) -> dict[str, str | int]:
        """Return the settings of the conversations that the plan records."""
        config, more = self.config, dict[str, str | int]()
        if fields := config.field_names:
            more["fields"] = ",".join(f"{own}={known}" for own, known in sorted(fields.items()))
        if config.join_turns:
            more["join-turns"] = "set"
        if config.max_tokens is not None:
            more |= {"max-tokens": config.max_tokens, "too-long": config.too_long}
        return {
            "chat": self.kind,
            "chat-template": self.fingerprint,
            "train-on": config.train_on,
            "date": self.date,
            **more,
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the template and its variables, 16 hex digits."""
        return configs.fingerprint(
            [self.template.source, self.template.tool_source, dict(self.template.variables)]
        )

    def origin(self, counts: dict[str, int]) -> ChatOrigin:
        """Return what the manifest records."""
        return ChatOrigin(
            kind=self.kind, template=self.fingerprint, train_on=self.config.train_on, counts=counts
        )

    def opener(self, tokenizer: Tokenizer) -> Callable[[], ChatEncoder]:
        """Return the function that starts the encoder."""
        return partial(ChatEncoder, tokenizer, self.template, self.config, kind=self.kind, date=self.date)

    def store(self, out: Path) -> None:
        """Write the template into a corpus's folder, for `data append` and for people."""
        if out.resolve() == self.folder.resolve():
            return
        *_, config = TEMPLATE_FILES
        if (source := self.folder / config).is_file():
            known, content = load_json(source), source.read_text(encoding="utf-8")
            if known.pop("chat_template", None) is not None:  # written below, or replaced
                content = json.dumps(known, indent=2, ensure_ascii=False) + "\n"
            write_atomic(out / config, content)
        templates = (self.template.source, self.template.tool_source)
        for name, template in zip(TEMPLATE_FILES, templates, strict=False):
            if template is not None:
                (out / name).parent.mkdir(exist_ok=True)
                write_atomic(out / name, template)


def chat_setup(
    config: ChatConfig, files: Sequence[InputFile], *, tokenizer: Path, zstd_long: int = ZSTD_LONG
) -> ChatSetup:
    """Find out what the records are, and read the template.

    Raises:
        UsageError: a file holds no records, there is no template, or no record is a conversation.
    """
    if others := [file.path for file in files if file.kind == "text" and not is_json(file.path)]:
        raise UsageError(
            f"{shown(others[0])} is a text; conversations are read from JSON lines and lists, CSV, Parquet, "
            "Hugging Face datasets saved to disk, and MDS",
            fix="Name such files; of a folder, choose them with --suffix.",
        )
    template = load_template(tokenizer.parent)
    if config.template is not None:
        template = replace(template, source=read_template(config.template), tool_source=None)
    if template.source is None:
        raise UsageError(
            f"{tokenizer.parent} has no chat template",
            fix="Give one with --chat-template FILE.jinja, or the folder of a model that was tuned to chat.",
        )
    kind = _kind(files, zstd_long, config.field_names)
    if kind == "pairs" and config.too_long == "cut":
        raise UsageError("A pair cannot be cut: its answers would not be whole", fix="Use --too-long drop.")
    newest = max(file.mtime_ns for file in files) // 10**9
    # A template may write the day; that of the inputs, so that the same inputs give the same bytes.
    date = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d")
    return ChatSetup(config=config, kind=kind, date=date, template=template, folder=tokenizer.parent)


def _kind(files: Sequence[InputFile], zstd_long: int, fields: Mapping[str, str]) -> ChatKind:
    options = ReadOptions(
        text_column="", max_document_bytes=256 * 2**20, zstd_long=zstd_long, chat=True, fields=fields
    )
    seen: object = None
    refused = ""
    for file in files:
        for record in read_records(file, options):
            if isinstance(record.content, RawChat):
                if kind := kind_of_chat(record.content.value):
                    return kind
                seen = seen or record.content.value
            elif isinstance(record.content, Rejection):
                refused = refused or f"{shown(file.path)}: {record.content.reason}"
            if record.index >= _PEEKED:
                break
    if refused and not seen:
        raise InputError(
            "No record of the inputs can be read", got=refused[:200], fix="Restore the file, or leave it out."
        )
    names = ", ".join(map(str, seen)) if isinstance(seen, dict) else "no JSON object"
    raise InputError(
        "No record of the inputs is a conversation",
        got=names[:200],
        fix=f"Records need {FORMS}. --fields OWN=KNOWN names fields of their own.",
    )
