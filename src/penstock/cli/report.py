"""Draw a run as one HTML page: loss, speed, time within a step, restarts, the recipe. Or compare runs.

The page is one file without external resources: it can be mailed, kept and opened offline. It can be drawn
while the run goes on, and again later. For a run on one corpus, the loss chart has a line at the entropy of
the corpus's token frequencies: the loss of a model that knows nothing else.

Several runs are drawn in the same charts: losses by step, by tokens and by time, speed, traffic, and the
settings in which their recipes differ.

Of a run of several ranks it has their heat map, and with --rows STEP what a step trained on: documents,
text and learned tokens of its first rows.

With --out FILE.csv or FILE.parquet the metrics themselves are written: a row for each step, none left out.

example:
  penstock report runs/first
  penstock report runs/first runs/second --out compared.html
  penstock report runs/first --out first.html --reference "unigram entropy=6.31" --rows 1200
  penstock report runs/first runs/second --out losses.csv --metrics loss,validation_loss

exit codes: 0 done, 1 the run has no step yet or its records are damaged, 2 wrong usage
"""

import argparse
import math
from contextlib import ExitStack, closing
from pathlib import Path

from penstock.cli.streams import complain
from penstock.console.runs.columns import RunColumns
from penstock.console.runs.discover import id_of
from penstock.console.runs.export import TableFormat, exported
from penstock.console.runs.rank_columns import RankColumns, reported_ranks
from penstock.console.runs.run_files import LocalFiles
from penstock.console.runs.step_rows import FIRST_ROWS, open_rows, rows_as_json
from penstock.core.config import load_json
from penstock.core.env import cache_folder
from penstock.core.errors import CorpusError, PenstockError, UsageError
from penstock.core.files import TOKENIZER_FILE, checksum, write_atomic
from penstock.core.units import plural
from penstock.data.corpus.open import open_corpus
from penstock.data.tools.describe import unigram_entropy
from penstock.obs.metric_names import METRICS_FILE, RANK_METRICS, RANKS_FILE, RECIPE_FILE
from penstock.obs.report.compare import MOST_RUNS, ComparedRun, render_comparison
from penstock.obs.report.history import gather, read_lines
from penstock.obs.report.ranks import ReportedRanks
from penstock.obs.report.report import render
from penstock.obs.report.rows import ReportedRows
from penstock.obs.report.summary import Config, setting

_TABLES: dict[str, TableFormat] = {".csv": "csv", ".parquet": "parquet"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folder of a run (run.dir of its recipe)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page to write; default: report.html in RUN; needed for several runs; "
        "ending in .csv or .parquet: the metrics of every step instead",
    )
    parser.add_argument(
        "--metrics",
        metavar="NAMES",
        help="metrics in a CSV or Parquet file, with commas between; default: all",
    )
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="NAME=LOSS",
        help="horizontal line of the loss chart, in nats per token, instead of the unigram entropy; "
        "may be repeated",
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="STEP",
        help="write in what this step trained on: its first rows with their text; needs the run's corpora",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    given = dict(_reference(text) for text in arguments.reference)
    configs = [_config(folder) for folder in arguments.runs]
    out: Path | None = arguments.out
    form = _TABLES.get(out.suffix.lower()) if out else None
    if out and form:
        if given:
            raise UsageError("--reference is for a page", fix="Leave it out, or end --out in .html.")
        if arguments.rows is not None:
            raise UsageError("--rows is for a page", fix="Leave it out, or end --out in .html.")
        _write_table(out, arguments.runs, metrics=(arguments.metrics or "").split(","), form=form)
        print(out)
        return 0
    if arguments.metrics:
        raise UsageError("--metrics is for CSV and Parquet files", fix="End --out in .csv or .parquet.")
    if len(arguments.runs) > 1:
        if arguments.rows is not None:
            raise UsageError("--rows is for one run only", fix="Leave it out, or give one run.")
        page = _comparison(arguments.runs, configs, references=given, out=out)
    else:
        (folder,), (config,) = arguments.runs, configs
        records = read_lines(folder / METRICS_FILE)
        references = given or _unigram_entropy(config)
        page = render(
            records,
            config,
            name=folder.resolve().name,
            references=references,
            ranks=_ranks(folder),
            rows=ReportedRows() if arguments.rows is None else _rows(folder, arguments.rows),
        )
        out = out or folder / "report.html"
    assert out is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, page)
    print(out)
    return 0


def _config(folder: Path) -> Config:
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", fix="Give the folder of a run (run.dir of its recipe).")
    for name in (METRICS_FILE, RECIPE_FILE):
        if not (folder / name).is_file():
            raise UsageError(
                f"{folder} holds no {name}", fix="Give the folder of a run; `penstock train` writes one."
            )
    return load_json(folder / RECIPE_FILE)


def _comparison(
    folders: list[Path], configs: list[Config], *, references: dict[str, float], out: Path | None
) -> str:
    if out is None:
        raise UsageError("Several runs need --out", fix="Name the page to write: --out compared.html.")
    if references:
        raise UsageError("--reference is for one run only", fix="Leave it out, or give one run.")
    if len(folders) > MOST_RUNS:
        raise UsageError(f"{len(folders)} runs are too many for one page", fix=f"Give at most {MOST_RUNS}.")
    runs = []
    for name, folder, config in zip(_names(folders), folders, configs, strict=True):
        try:
            history = gather(read_lines(folder / METRICS_FILE))
            runs.append(ComparedRun(name, history, config, tokenizer=_tokenizer(folder)))
        except PenstockError as error:
            raise PenstockError(f"{folder}: {error}") from None
    return render_comparison(runs)


def _ranks(folder: Path) -> ReportedRanks:
    """Return the metrics of the run's ranks; they are parsed into the cache of `penstock console`, once."""
    if not (folder / RANKS_FILE).is_file():
        return ReportedRanks()
    cache = _cache(folder, suffix="-ranks")
    with ExitStack() as stack:

        def opened(metric: str) -> RankColumns:
            columns = stack.enter_context(closing(RankColumns(LocalFiles(folder), metric, cache / metric)))
            columns.update()
            return columns

        try:
            return reported_ranks(opened, first=next(iter(RANK_METRICS)))
        except PenstockError as error:
            complain(f"The page has no heat map of the ranks: {error}")
            return ReportedRanks()


def _rows(folder: Path, step: int) -> ReportedRows:
    try:
        opened, found = open_rows(folder, step, offset=0, limit=FIRST_ROWS)
    except CorpusError as error:
        raise CorpusError(
            f"The rows of step {step:,} cannot be read: {error}",
            fix="Or leave out --rows, which needs the corpora where the run's recipe has them.",
        ) from None
    with closing(RunColumns(LocalFiles(folder), _cache(folder))) as columns:
        columns.update()
        return ReportedRows(found=rows_as_json(opened, found, columns, offset=0))


def _cache(folder: Path, *, suffix: str = "") -> Path:
    return cache_folder() / "console" / f"{id_of(str(folder.resolve()))}{suffix}"


def _write_table(out: Path, folders: list[Path], *, metrics: list[str], form: TableFormat) -> None:
    """Write all steps of some runs; columns are parsed into the cache of `penstock console`, once."""
    with ExitStack() as stack:
        runs = {}
        for name, folder in zip(_names(folders), folders, strict=True):
            columns = stack.enter_context(closing(RunColumns(LocalFiles(folder), _cache(folder))))
            columns.update()
            if columns.num_damaged:
                complain(f"{folder}: {plural(columns.num_damaged, 'line')} that are no records are left out")
            runs[name] = columns
        pieces = exported(runs, [name.strip() for name in metrics if name.strip()], form=form)
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_name(f".{out.name}.tmp")
        try:
            with draft.open("wb") as file:
                file.writelines(pieces)
            draft.replace(out)
        finally:
            draft.unlink(missing_ok=True)


def _tokenizer(folder: Path) -> str:
    try:
        return checksum(folder / TOKENIZER_FILE)
    except OSError:  # corpora of other tools have no tokenizer
        return ""


def _names(folders: list[Path]) -> list[str]:
    """Return the folders' own names, with as many parents as needed to distinguish them."""
    parts = [folder.resolve().parts for folder in folders]
    for number in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-number:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UsageError("A run is given twice", got=", ".join(map(str, folders)), fix="Name each once.")


def _unigram_entropy(config: Config) -> dict[str, float]:
    corpora = setting(config, "data.corpora")
    if not isinstance(corpora, dict) or len(corpora) != 1:  # for a mixture it depends on the weights
        return {}
    path = setting(next(iter(corpora.values())), "path")
    try:
        return {"unigram entropy": unigram_entropy(open_corpus(Path(str(path))))}
    except (PenstockError, OSError) as error:
        complain(f"The loss chart has no line for the unigram entropy: {error}")
        return {}


def _reference(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        loss = float(value)
    except ValueError:
        loss = math.nan
    if not name or not math.isfinite(loss):
        raise UsageError("--reference takes NAME=LOSS", got=text, fix='Example: --reference "unigram=6.31".')
    return name.strip(), loss
