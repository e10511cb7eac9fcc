"""Corpora of text: opened as tokens that a process in the background makes, once, into a cache folder.

    text:web.jsonl.zst,tokenizer=tokenizer.json
    text:/data/wiki,tokenizer=t.json,column=body,cache=/scratch/corpora

The folder's name is a function of the inputs (names, sizes, times of change), the tokenizer and the options,
so other inputs get another folder. It is a corpus like any other: parts that are finished are never
altered, and what a run reads does not depend on how far the preparation had come.
"""

import os
from pathlib import Path
from weakref import WeakValueDictionary

from penstock.core import clock, config
from penstock.core.errors import UsageError
from penstock.core.units import parse_count
from penstock.data.index_folder import NO_PLACE, index_folders
from penstock.data.manifest import FILE, tokenizer_at
from penstock.data.preparation import Preparation, is_finished
from penstock.data.prepare.background import Job
from penstock.data.prepare.inputs import Selection, find_inputs
from penstock.data.prepare.plan import PrepareConfig, make_plan
from penstock.data.spec import Spec
from penstock.data.storage import LocalStorage
from penstock.text.tokenizer import Tokenizer

_POLL_S = 0.1
_NUMBERS = ("first_part_tokens", "part_tokens", "max_errors", "max_document_bytes")


_known: WeakValueDictionary[tuple[int, str, str], Preparation] = WeakValueDictionary()


def open_text(spec: Spec) -> tuple[Path, Preparation | None]:
    """Return the folder that the tokens of a text are in, or coming into; its first part is there.

    Returns:
        the folder, and what must be kept as long as it is read: it prepares the rest. None: it is whole.

    Raises:
        UsageError: no such input, no tokenizer, or an option out of range.
        CorpusError: the preparation failed; the message says why.
    """
    key = (os.getpid(), str(Path(spec.location).absolute()), repr(sorted(spec.options.items())))
    preparation = _known.get(key)  # of this process: one that it was forked from keeps its own
    if preparation is None:
        folder = folder_of(spec)
        if is_finished(folder):
            return folder, None
        job = Job(
            parent=os.getpid(),
            folder=str(folder),
            directory=str(_inputs(spec).parent),
            name=_inputs(spec).name,
            options={**_options(spec), "tokenizer": str(_tokenizer(spec))},
        )
        preparation = _known.setdefault(key, Preparation(spec.location, folder, job))
    preparation.keep_going()
    while not (preparation.folder / FILE).is_file():
        clock.sleep(_POLL_S)
        preparation.keep_going()
    return preparation.folder, preparation


def vocab_size_of(spec: Spec) -> int:
    """Return the vocabulary of a text's tokens; nothing is prepared.

    Raises:
        UsageError, InputError: there is no tokenizer.
    """
    return Tokenizer.load(_tokenizer(spec)).vocab_size


def folder_of(spec: Spec) -> Path:
    """Return the cache folder of a text, made if it was not there.

    It lies in the folder of the option `cache`; or else in `.penstock` beside the inputs; or, where nothing
    can be written there, in the user's cache folder.

    Raises:
        UsageError, InputError: the inputs or the tokenizer are missing.
        OSError: no folder takes it.
    """
    inputs = _inputs(spec)
    tokenizer = Tokenizer.load(_tokenizer(spec)).fingerprint
    files, _ = find_inputs([str(inputs)], Selection())
    settings = PrepareConfig(tokenizer=_tokenizer(spec), stream=True, **_options(spec))  # type: ignore[arg-type]
    known = [[os.path.relpath(file.path, inputs.parent), file.bytes, file.mtime_ns] for file in files]
    name = f"text-{config.fingerprint([known, make_plan(settings, (), tokenizer=tokenizer).options])}"
    if cache := spec.options.get("cache"):
        folder = Path(cache).absolute() / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    *preferred, last = (root / name for root in index_folders(LocalStorage(inputs.parent)))
    for folder in preferred:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in NO_PLACE:
                raise
        else:
            if is_finished(folder) or os.access(folder, os.W_OK):
                return folder
    last.mkdir(parents=True, exist_ok=True)
    return last


def _inputs(spec: Spec) -> Path:
    """Return the input, by a path that does not change with the working directory."""
    if "://" in spec.location:
        raise UsageError(
            "A text: corpus is read from files of this machine",
            got=spec.location,
            fix="Fetch them first, or prepare them where they are and read the corpus from there.",
        )
    return Path(os.path.abspath(spec.location))  # noqa: PTH100  Path.absolute keeps ".."


def _tokenizer(spec: Spec) -> Path:
    if "tokenizer" not in spec.options:
        raise UsageError(
            f"The text {spec.location} needs a tokenizer",
            fix=f"Write text:{spec.location},tokenizer=FILE with a model's tokenizer.json. To make one: "
            f"`penstock data prepare {spec.location} --train-tokenizer 32000 --out DIR` leaves it in DIR.",
        )
    return tokenizer_at(spec.options["tokenizer"]).absolute()


def _options(spec: Spec) -> dict[str, str | int]:
    """Return the options of PrepareConfig that a spec has."""
    numbers = {name: parse_count(spec.options[name]) for name in _NUMBERS if name in spec.options}
    column = {"text_column": spec.options["column"]} if "column" in spec.options else {}
    return {**numbers, **column}
