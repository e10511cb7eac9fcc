"""Corpora of text: tokenized once, in the background, into a cache folder.

    text:web.jsonl.zst,tokenizer=tokenizer.json
    text:/data/wiki,tokenizer=t.json,column=body,cache=/scratch/corpora

The folder's name is a function of the inputs (names, sizes, modification times), the tokenizer and the
options, so other inputs get another folder. It is an ordinary corpus: finished parts are never altered, and
the order of a run does not depend on the progress of the preparation.
"""

import os
import shlex
from pathlib import Path
from weakref import WeakValueDictionary

from penstock.core import clock, config
from penstock.core.errors import UsageError
from penstock.core.files import MANIFEST_FILE
from penstock.core.units import parse_count
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.manifest import load_manifest, tokenizer_at
from penstock.data.corpus.open import from_manifest, tokenizer_path
from penstock.data.corpus.spec import Spec
from penstock.data.formats.index_cache import NO_PLACE, index_folders
from penstock.data.prepare.background import Preparation, PreparationJob, is_finished
from penstock.data.prepare.inputs import Selection, find_inputs
from penstock.data.prepare.plan import PrepareConfig, make_plan
from penstock.storage.base import LocalStorage
from penstock.text.tokenizer import Tokenizer

_POLL_S = 0.1
_NUMBERS = ("first_part_tokens", "part_tokens", "max_errors", "max_document_bytes", "zstd_long")


_known: WeakValueDictionary[tuple[int, str, str], Preparation] = WeakValueDictionary()


def open_text(spec: Spec) -> tuple[Path, Preparation | None]:
    """Return the folder of a text's tokens once its first part is finished.

    Returns:
        the folder, and a handle to keep while it is read: it prepares the rest. None: the corpus is complete.

    Raises:
        UsageError: no such input, no tokenizer, or an option out of range.
        CorpusError: the preparation failed; the message contains the reason.
    """
    key = (os.getpid(), str(Path(spec.location).absolute()), repr(sorted(spec.options.items())))
    preparation = _known.get(key)  # keyed by process: after a fork the parent keeps its own
    if preparation is None:
        folder = folder_of(spec)
        if is_finished(folder):
            return folder, None
        job = PreparationJob(
            parent=os.getpid(),
            folder=str(folder),
            directory=str(_inputs(spec).parent),
            name=_inputs(spec).name,
            options={**_options(spec), "tokenizer": str(_tokenizer(spec))},
        )
        preparation = _known.setdefault(key, Preparation(spec.location, folder, job))
    preparation.keep_going()
    while not (preparation.folder / MANIFEST_FILE).is_file():
        clock.sleep(_POLL_S)
        preparation.keep_going()
    return preparation.folder, preparation


def vocab_size_of(spec: Spec) -> int:
    """Return the vocabulary size of a text's tokens without preparing it.

    Raises:
        UsageError, InputError: there is no tokenizer.
    """
    return Tokenizer.load(_tokenizer(spec)).vocab_size


def folder_of(spec: Spec) -> Path:
    """Return the cache folder of a text, created if missing.

    It is in the folder of the option `cache`, else in `.penstock` beside the inputs or, if that is not
    writable, in the user's cache folder.

    Raises:
        UsageError, InputError: the inputs or the tokenizer are missing.
        OSError: none of the folders is writable.
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
    """Return the absolute path of the input."""
    if "://" in spec.location:
        raise UsageError(
            "A text: corpus is read from local files",
            got=spec.location,
            fix="Fetch them first, or prepare them on their machine and read the corpus from there.",
        )
    return Path(os.path.abspath(spec.location))  # noqa: PTH100  Path.absolute keeps ".."


def _tokenizer(spec: Spec) -> Path:
    if "tokenizer" not in spec.options:
        raise UsageError(
            f"The text {spec.location} needs a tokenizer",
            fix=f"Write text:{spec.location},tokenizer=FILE with a model's tokenizer.json. To make one: "
            f"`penstock data prepare {shlex.quote(str(spec.location))} --train-tokenizer 32000 --out DIR` "
            "leaves it in DIR.",
        )
    return tokenizer_at(spec.options["tokenizer"]).absolute()


def _options(spec: Spec) -> dict[str, str | int]:
    """Return the options of PrepareConfig given in a spec."""
    numbers = {name: parse_count(spec.options[name]) for name in _NUMBERS if name in spec.options}
    names = {"column": "text_column", "html": "html"}
    return {**numbers, **{names[name]: spec.options[name] for name in names if name in spec.options}}


def open_text_corpus(spec: Spec) -> Corpus:
    """Open a corpus of text; its finished parts can be read at once.

    Raises:
        CorpusError, UsageError: as `open_corpus`.
    """
    folder, preparation = open_text(spec)
    storage, manifest = LocalStorage(folder), load_manifest(folder)
    corpus = from_manifest(storage, manifest, tokenizer_path=tokenizer_path(storage, manifest))
    corpus.preparation = preparation
    return corpus
