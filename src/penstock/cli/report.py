"""Draw a run as one HTML page: its curves, a summary, ranks, answers, the recipe. Or compare runs.

The page is the console's page of a run with its data inlined: one file without external resources, which can
be mailed, kept and opened offline. It can be drawn while the run trains, and again later. For a run on one
corpus, the loss chart has a line at the entropy of the corpus's token frequencies: the loss of a model that
knows nothing else.

Several runs are drawn in the same charts, by step, tokens, time or cost, with their key figures and the
settings in which their recipes differ. The file has the page of each run, too.

With several ranks it has their heat map, and with --rows STEP the data of a step: documents,
text and learned tokens of its first rows.

With --out FILE.csv or FILE.parquet the metrics themselves are written: a row for each step, none left out.

example:
  penstock report runs/first
  penstock report runs/first runs/second --out compared.html
  penstock report runs/first --out first.html --reference "unigram entropy=6.31" --rows 1200
  penstock report runs/first runs/second --out losses.csv --metrics loss,validation_loss
  penstock report s3://bucket/runs/first --out first.html

exit codes: 0 done, 1 the run has no step yet, 2 wrong usage
"""

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from penstock.cli.options import add_fields, options_of
from penstock.cli.streams import warn
from penstock.core.config import listed_names, parse_json
from penstock.core.errors import CorpusError, PenstockError, UsageError
from penstock.core.files import write_atomic
from penstock.core.units import plural
from penstock.data.corpus.open import open_corpus
from penstock.data.tools.describe import unigram_entropy
from penstock.obs.metric_names import METRICS_FILE, RANK_METRICS, RANKS_FILE, RECIPE_FILE
from penstock.obs.report import MAX_RUNS, ReportedRun, ranks_of, render
from penstock.obs.run_data.columns import RunColumns, RunData
from penstock.obs.run_data.discover import FoundRun, files_of
from penstock.obs.run_data.export import TableFormat, write_steps
from penstock.obs.run_data.hangs import RecentHangs
from penstock.obs.run_data.rank_columns import RankColumns
from penstock.obs.run_data.run_files import RunFiles
from penstock.obs.run_data.run_row import Summaries
from penstock.obs.run_data.step_rows import note_of, shown_rows
from penstock.obs.run_data.summary import Config, setting, starts_of
from penstock.train.inspect.row_texts import FIRST_ROWS, rows_view

_TABLES: dict[str, TableFormat] = {".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Options of a report."""

    out: Annotated[Path | None, "FILE"] = None
    """The page to write; default: report.html in RUN; needed for several runs; ending in .csv or .parquet:
    the metrics of every step instead."""
    metrics: Annotated[str, "NAMES"] = ""
    """Metrics in a CSV or Parquet file, with commas between, a name with a comma in quotes. Empty: all."""
    reference: Annotated[tuple[str, ...], "NAME=LOSS"] = ()
    """Horizontal line of the loss chart, in nats per token, instead of the unigram entropy."""
    rows: Annotated[int | None, "STEP"] = None
    """Include the first rows of this step with their text; needs the run's corpora."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run (run.dir of its recipe), or the address of its copy: s3://, gs://, az://, https://",
    )
    add_fields(parser, ReportOptions)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    options = options_of(arguments, ReportOptions)
    given = dict(map(_reference, options.reference))
    files = [files_of(location) for location in arguments.runs]
    recipes = [_config(each) for each in files]
    out = options.out
    form = _TABLES.get(out.suffix.lower()) if out else None
    if out and form:
        _refuse_of_one_page(options, "a page", fix="Leave it out, or end --out in .html.")
        _write_table(out, files, metrics=listed_names(options.metrics), form=form)
        print(out)
        return 0
    if options.metrics:
        raise UsageError("--metrics is for CSV and Parquet files", fix="End --out in .csv or .parquet.")
    if len(files) > 1:
        _check_comparison(options, num_runs=len(files))
    elif out is None and files[0].is_stored:
        raise UsageError(
            "A run in an object store needs --out", fix="Name the page to write: --out run.html."
        )
    is_one = len(files) == 1
    names = [Path(files[0].location).resolve().name] if is_one else _names(files)
    runs = []
    for name, own, recipe in zip(names, files, recipes, strict=True):
        try:
            runs.append(_reported(name, own, recipe, has_ranks=is_one))
        except PenstockError as error:
            raise error if is_one else PenstockError(f"{own.location}: {error}") from None
    if is_one:
        rows = None if options.rows is None else _rows(files[0].folder, options.rows, runs[0].data)
        runs = [replace(runs[0], references=given or _unigram_entropy(recipes[0]), rows=rows)]
    out = out or files[0].folder / "report.html"
    page = render(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, page)
    print(out)
    return 0


def _config(run: RunFiles) -> Config:
    if not run.is_stored and not run.folder.is_dir():
        raise UsageError(
            f"{run.location} is not a folder", fix="Give the folder of a run (run.dir of its recipe)."
        )
    for name in (METRICS_FILE, RECIPE_FILE):
        if not _has(run, name):
            raise UsageError(
                f"{run.location} holds no {name}",
                fix="Give the folder of a run; `penstock train` writes one.",
            )
    with run.open(RECIPE_FILE) as file:
        return parse_json(file.read(run.stamp(RECIPE_FILE).size), name=f"{run.location}/{RECIPE_FILE}")


def _refuse_of_one_page(options: ReportOptions, what: str, *, fix: str) -> None:
    """Refuse options that are for the page of one run."""
    for option, is_given in (("--rows", options.rows is not None), ("--reference", options.reference)):
        if is_given:
            raise UsageError(f"{option} is for {what}", fix=fix)


def _check_comparison(options: ReportOptions, *, num_runs: int) -> None:
    """Refuse options that do not fit several runs."""
    _refuse_of_one_page(options, "one run only", fix="Leave it out, or give one run.")
    if options.out is None:
        raise UsageError("Several runs need --out", fix="Name the page to write: --out compared.html.")
    if num_runs > MAX_RUNS:
        raise UsageError(f"{num_runs} runs are too many for one page", fix=f"Give at most {MAX_RUNS}.")


def _reported(name: str, files: RunFiles, recipe: Config, *, has_ranks: bool) -> ReportedRun:
    """Return what a report has of a run."""
    data = _data(files)
    if not data.num_rows():
        raise PenstockError("The run has not recorded a step yet", fix="Try again after its first step.")
    found, rows = FoundRun(name, name, files), Summaries()

    def opened(metric: str) -> RankColumns:
        columns = RankColumns(files, metric)
        columns.update()
        return columns

    if has_ranks:
        ranks, left_out = ranks_of(opened, has_others=not files.is_stored)  # stores bill what is read
    else:
        ranks, left_out = {}, [*RANK_METRICS] if _has(files, RANKS_FILE) else []
    return ReportedRun(
        found=found,
        row={**rows.row(found), "ranks": next((start.ranks for start in reversed(starts_of(data))), None)},
        data=data,
        recipe=recipe,
        price=rows.price(found),
        ranks=ranks,
        ranks_left_out=left_out,
        hangs=RecentHangs().read(files, data.starts),
    )


def _has(files: RunFiles, name: str) -> bool:
    try:
        files.stamp(name)
    except OSError:
        return False
    return True


def _data(run: RunFiles) -> RunData:
    """Return what a run has recorded; lines that are no records are counted."""
    columns = RunColumns(run)
    columns.update()
    if number := columns.data.num_damaged:
        warn(f"{run.location}: {plural(number, 'line')} that are no records are left out")
    return columns.data


def _rows(folder: Path, step: int, data: RunData) -> dict[str, Any]:  # Any: JSON
    try:
        found = rows_view(folder, step, offset=0, limit=FIRST_ROWS)
    except CorpusError as error:
        raise CorpusError(
            f"The rows of step {step:,} cannot be read: {error}",
            fix="Or leave out --rows, which needs the corpora where the run's recipe has them.",
        ) from None
    steps = data.column("step")
    note = note_of(found, steps_recorded=int(steps[-1]) if len(steps) else 0, events=data.events)
    why = "The console computes the loss of each token."
    return {**shown_rows(found, note=note), "why_no_losses": why}


def _write_table(out: Path, files: list[RunFiles], *, metrics: list[str], form: TableFormat) -> None:
    """Write all steps of some runs."""
    runs = {name: _data(run) for name, run in zip(_names(files), files, strict=True)}
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.tmp")
    try:
        write_steps(draft, runs, metrics, form=form)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)


def _names(runs: list[RunFiles]) -> list[str]:
    """Return the runs' own names, with as many parents as needed to distinguish them."""
    paths = [run.location if run.is_stored else str(run.folder.resolve()) for run in runs]
    parts = [path.split("/") for path in paths]
    for number in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-number:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise UsageError("A run is given twice", got=", ".join(paths), fix="Name each once.")


def _unigram_entropy(config: Config) -> dict[str, float]:
    corpora = setting(config, "data.corpora")
    if not isinstance(corpora, dict) or len(corpora) != 1:  # for a mixture it depends on the weights
        return {}
    path = setting(next(iter(corpora.values())), "path")
    try:
        return {"unigram entropy": unigram_entropy(open_corpus(Path(str(path))))}
    except (PenstockError, OSError) as error:
        warn(f"The loss chart has no line for the unigram entropy: {error}")
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
