"""Tasks of an evaluation: files of the user, then those that lm-eval ships; nothing is downloaded unasked.

A task file can run code in three ways: `!function` names a Python function, a metric that lm-eval does not
have is a program of Hugging Face's hub, and templates are Jinja, which lm-eval renders without a sandbox. So
the first two are refused in files that are not lm-eval's own, and templates are rendered in jinja2's sandbox,
unless the user trusts the files.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.core import env
from penstock.core.errors import PackageMissing, PenstockError, UsageError, nearest
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.seeds import seeded

TaskDict = dict[str, Any]  # Any: lm-eval's tasks and groups, by name

_NAME = re.compile(rb"^(?:task|group|tag):[ \t]*['\"]?([\w.+:-]+)", re.MULTILINE)
_SUFFIXES = (".yaml", ".yml", ".json")
_LOCAL_FORMATS = ("json", "csv", "parquet", "text", "arrow")


def prepare(*, download: bool) -> None:
    """Load lm-eval, offline unless `download`; call before any of its modules is imported elsewhere.

    Raises:
        PackageMissing: it is not installed.
    """
    env.prepare_hub(offline=not download)
    try:
        import datasets
        import lm_eval.evaluator  # noqa: F401
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise PackageMissing(
            f"Tasks need the package {error.name}, which is not installed",
            fix="pip install 'penstock[eval]'",
        ) from None
    import huggingface_hub.constants
    import lm_eval.api.task as task

    task.tqdm = partial(tqdm, disable=True)  # progress is shown by the caller
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = not download
    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def load_tasks(names: Sequence[str], options: EvaluationOptions) -> TaskDict:
    """Return lm-eval's dictionary of tasks and groups, ready for its `evaluate`.

    Args:
        names: names of tasks that lm-eval ships, groups, tags, patterns with `*`, or files.

    Raises:
        UsageError: an unknown task, a task that asks for a download or for trust, a file that is no task.
        PackageMissing: lm-eval is not installed.
    """
    if not names:
        raise UsageError("There is no task to evaluate", fix="Name one, such as --tasks hellaswag.")
    prepare(download=options.download)
    _render_in_a_sandbox(trusted=options.trust_tasks)
    found: TaskDict = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        for spec in _specs(name, options):
            with seeded():
                loaded = _loaded(name, spec)
            if twice := found["tasks"].keys() & loaded["tasks"].keys():
                raise UsageError("A task is named twice", got=min(twice), fix="Name it once.")
            for part in found:
                found[part] |= loaded.get(part) or {}
    for task in found["tasks"].values():
        _set_shots(task, options)
    return found


def _set_shots(task: Any, options: EvaluationOptions) -> None:
    """Set the number of examples as lm-eval does: a task that says 0 keeps it."""
    own = task.get_config("num_fewshot")
    if options.shots is not None and own != 0:
        task.set_config(key="num_fewshot", value=options.shots)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=options.fewshot_seed)
    if task.get_config("num_fewshot") and not hasattr(task, "sampler"):
        raise UsageError(
            f"The task {task.task_name} has no examples to show",
            got=task.get_config("num_fewshot"),
            fix="Give it a fewshot_split, or leave --shots out.",
        )


def is_file(name: str) -> bool:
    """Return True if the name of a task is a path.

    >>> is_file("./mine.yaml"), is_file("tasks/mine.json"), is_file("hellaswag")
    (True, True, False)
    """
    return name.endswith(_SUFFIXES) or "/" in name


def _specs(name: str, options: EvaluationOptions) -> Iterator[Any]:
    """Yield what lm-eval's task manager takes for a name: a configuration, or the name of what it ships."""
    if is_file(name):
        yield read_file(Path(name), trusted=options.trust_tasks, download=options.download)
        return
    known = shipped()
    chosen = [name] if name in known else _matching(name, known)
    if not chosen:
        hint = nearest(name, sorted(known))
        raise UsageError(
            "lm-eval has no such task",
            got=name,
            fix=hint if hint.startswith("Did") else "A file of your own is given by its path: ./mine.yaml.",
        )
    yield from chosen


def _matching(pattern: str, known: Mapping[str, Path]) -> list[str]:
    from fnmatch import filter as matching

    return sorted(matching(known, pattern)) if "*" in pattern else []


def read_file(path: Path, *, trusted: bool, download: bool = False) -> dict[str, Any]:
    """Return the configuration of a task file, YAML or JSON; paths in it may be relative to its folder.

    Raises:
        UsageError: it does not exist, is not a task, names code without being trusted, or an address without
            `download`.
    """
    path = path.expanduser()
    if not path.is_file():
        raise UsageError(f"The task file {path} does not exist", fix="Correct the path.")
    if path.suffix != ".json":
        _check_functions(path, trusted=trusted, seen=set())
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        config: Any = json.loads(path.read_text()) if path.suffix == ".json" else load_yaml(path)
    except Exception as error:  # whatever the reader of a user's file raises is about the file
        raise _unreadable(path, error) from None
    if not isinstance(config, dict) or not (config.keys() & {"task", "group"}):
        raise UsageError(
            f"{path} is not a task: it names no `task` and no `group`",
            fix="docs/how-to/evaluate.md has an example.",
        )
    if not trusted:
        _check_metrics(config, path)
        _check_data(config, path)
    _find_data(config, path.resolve().parent, download=download)
    return config


def _check_metrics(config: Any, path: Path) -> None:
    """Refuse metrics that are not lm-eval's own: Hugging Face's library runs a file for them."""
    import lm_eval.api.metrics  # noqa: F401, which registers them
    from lm_eval.api.registry import METRIC_REGISTRY

    for one in config.get("metric_list") or () if isinstance(config, dict) else ():
        if not isinstance(one, dict):
            continue
        if one.get("metric") not in METRIC_REGISTRY or one.get("hf_evaluate"):
            raise UsageError(
                f"{path} has a metric that lm-eval does not have by itself",
                got=one.get("metric"),
                fix=f"{nearest(str(one.get('metric')), sorted(METRIC_REGISTRY))} --trust-tasks takes others.",
            )
    members = config.get("task") if isinstance(config, dict) else None
    for member in members if isinstance(members, list) else ():
        _check_metrics(member, path)


def _check_data(config: Any, path: Path) -> None:
    """Refuse data that runs code as it is read: a dataset's own program, and readers that unpickle."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as READERS

    kwargs, source = config.get("dataset_kwargs"), config.get("dataset_path")
    if isinstance(kwargs, dict) and kwargs.get("trust_remote_code"):
        raise UsageError(
            f"{path} asks to run the program of a dataset",
            got="trust_remote_code",
            fix="--trust-tasks allows it.",
        )
    if source in READERS and source not in _LOCAL_FORMATS:
        fix = f"Use one of {', '.join(_LOCAL_FORMATS)}; --trust-tasks allows others."
        raise UsageError(f"{path} reads its data by another program than a file's", got=source, fix=fix)
    for member in config["task"] if isinstance(config.get("task"), list) else ():
        if isinstance(member, dict):
            _check_data(member, path)


def _find_data(config: Any, folder: Path, *, download: bool) -> None:
    """Resolve the data files of a configuration against the folder of its file, where they are there."""
    kwargs = config.get("dataset_kwargs")
    if isinstance(kwargs, dict) and config.get("dataset_path") in _LOCAL_FORMATS:
        named = {key: kwargs[key] for key in ("data_files", "data_dir") if key in kwargs}
        kwargs |= {key: _resolved(value, folder, download=download) for key, value in named.items()}
    elif isinstance(path := config.get("dataset_path"), str) and (folder / path).is_dir():
        config["dataset_path"] = str(folder / path)
    for member in config["task"] if isinstance(config.get("task"), list) else ():
        if isinstance(member, dict):
            _find_data(member, folder, download=download)


def _resolved(name: Any, folder: Path, *, download: bool) -> Any:
    """Return a path, or paths in lists or dictionaries, from the folder if it is there."""
    if isinstance(name, list):
        return [_resolved(one, folder, download=download) for one in name]
    if isinstance(name, dict):
        return {key: _resolved(one, folder, download=download) for key, one in name.items()}
    if not isinstance(name, str):
        return name
    if "://" in name or "::" in name:
        if not download:
            fix = f"--download allows it. Or put the data into {folder}."
            raise UsageError("A task asks for data from an address", got=name, fix=fix)
        return name
    beside = folder / name
    is_there = any(folder.glob(name)) if "*" in name and not Path(name).is_absolute() else beside.exists()
    if not is_there and not Path(name).exists() and "*" not in name:
        raise UsageError(f"The data file {name} of a task does not exist", fix=f"Put it into {folder}.")
    return str(beside) if is_there else name


def _check_functions(path: Path, *, trusted: bool, seen: set[Path]) -> None:
    """Refuse `!function` in a file and those that it includes, unless it is lm-eval's own or trusted.

    What a file includes is read as YAML whatever its name is.
    """
    path = path.resolve()
    if path in seen or path.is_relative_to(_folder()):
        return
    seen.add(path)
    import yaml

    named: list[str] = []

    class TaskLoader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML with the tag of lm-eval, which is kept and not called."""

    TaskLoader.add_constructor("!function", lambda _, node: named.append(str(node.value)))
    try:
        config = yaml.load(path.read_text(), Loader=TaskLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise _unreadable(path, error) from None
    if named and not trusted:
        raise UsageError(
            f"{path} runs Python code: !function",
            got=named[0],
            fix="Read the code that it names, then give --trust-tasks.",
        )
    includes = config.get("include", []) if isinstance(config, dict) else []
    for one in includes if isinstance(includes, list) else [includes]:
        if (file := path.parent / str(one)).is_file():
            _check_functions(file, trusted=trusted, seen=seen)


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} cannot be read as a task: {' '.join(str(error).split())}", fix="Correct it.")


def _loaded(name: str, spec: Any) -> TaskDict:
    """Build a task, group or tag.

    Raises:
        UsageError: it asks for a download that is not allowed, or its file is wrong.
    """
    try:
        return _built(spec)
    except PenstockError:
        raise
    except Exception as error:  # lm-eval and datasets raise whatever they come upon
        if _is_about_downloads(error):
            raise UsageError(
                f"The task {name} asks for a download: {_first_line(error)}",
                fix="Give --download, or copy its data into a local JSON file and name that in a task file.",
            ) from error
        raise UsageError(
            f"The task {name} cannot be set up ({type(error).__name__}: {_first_line(error)})",
            fix="Correct its file." if is_file(name) else "Its data may have changed; see lm-eval's issues.",
        ) from error


def _built(spec: Any) -> TaskDict:
    from lm_eval.tasks import TaskManager

    if isinstance(spec, str):
        home = shipped()[spec]
        try:
            return _checked(TaskManager(include_defaults=False, include_path=[home]).load(spec))
        except KeyError:  # a group whose members stand in other folders; reading all takes half a minute
            return _checked(TaskManager().load(spec))
    members = spec.get("task")
    names = [one for one in members if isinstance(one, str)] if isinstance(members, list) else []
    known = shipped() if names else {}
    homes = sorted({known[one] for one in names if one in known})
    return _checked(TaskManager(include_defaults=False, include_path=homes or None).load(spec))


def _checked(loaded: Any) -> TaskDict:
    """Refuse tasks that lm-eval could not compute; it would fail at the end."""
    from lm_eval.api.registry import METRIC_REGISTRY

    for task in loaded["tasks"].values():
        config = task.config
        for metric, function in getattr(task, "_metric_fn_list", {}).items():
            if function is None and config.process_results is None:
                raise UsageError(
                    f"The task {task.task_name} has a metric that lm-eval does not have by itself",
                    got=metric,
                    fix=nearest(str(metric), sorted(METRIC_REGISTRY)),
                )
        if getattr(task, "UNSAFE_CODE", False):
            raise UsageError(
                f"The task {task.task_name} runs code that the model writes",
                fix="Use lm-eval itself for it, in a sandbox, against `penstock serve`.",
            )
        if getattr(task, "MULTIMODAL", False):
            raise UsageError(f"The task {task.task_name} shows images or sounds", fix="Leave it out.")
    return dict(loaded)


def _is_about_downloads(error: BaseException | None) -> bool:
    """Return True if an error, or what led to it, is an attempt to reach the Hub."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        if names & {
            "OfflineModeIsEnabled",
            "ConnectionError",
            "LocalEntryNotFoundError",
            "DatasetNotFoundError",
        }:
            return True
        if "offline" in str(error).lower() or "doesn't exist on the Hub" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")


def shipped() -> dict[str, Path]:
    """Return the name of each task, group and tag that lm-eval ships, with the folder it stands in.

    Names are found in the text of the files: parsing their 14,000 takes half a minute.
    """
    found: dict[str, Path] = {}
    for file in sorted(_folder().glob("**/*.yaml")):
        top = _folder() / file.relative_to(_folder()).parts[0]
        for name in _NAME.findall(file.read_bytes()):
            found.setdefault(name.decode(), top)
    return found


def _folder() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def _render_in_a_sandbox(*, trusted: bool) -> None:
    """Render the templates of tasks in jinja2's sandbox, or as lm-eval does by itself."""
    from jinja2 import BaseLoader, Environment, StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    kind = Environment if trusted else SandboxedEnvironment
    if type(utils.env) is kind:
        return
    environment = kind(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = utils.regex_replace
    utils.env = environment
