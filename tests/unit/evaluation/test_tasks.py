"""Tasks that are refused before a model is opened: each with its value and what to do."""

import json

import pytest

from penstock.core.errors import UsageError
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.tasks import load_tasks, shipped
from tests.made_tasks import CLOZE, own_cache

EVIL = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Data sets of tests leave nothing in the user's cache."""
    with own_cache(tmp_path_factory.mktemp("hf")):
        yield


@pytest.fixture
def file(tmp_path):
    """A task file that can be loaded."""
    (tmp_path / "docs.jsonl").write_text(json.dumps({"question": "the dam", "choices": ["flows"]}) + "\n")
    return write(tmp_path, CLOZE)


def write(folder, task, **more):
    path = folder / "mine.json"
    data = {"dataset_kwargs": {"data_files": "docs.jsonl"}}
    path.write_text(json.dumps({"task": "mine", **task, **data, **more}))
    return path


def load(*names, **options):
    return load_tasks([str(name) for name in names], EvaluationOptions(**options))


def test_a_file_is_loaded_with_the_data_beside_it_from_any_folder(file, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert list(load(file)["tasks"]) == ["mine"]
    assert list(load("../mine.json")["tasks"]) == ["mine"]


def test_yaml_says_the_same_and_may_include_another_file(file, tmp_path):
    (tmp_path / "base.yaml").write_text(
        json.dumps({**json.loads(file.read_text()), "task": "base"})
    )  # JSON is YAML
    (tmp_path / "mine.yaml").write_text("include: base.yaml\ntask: other\n")
    assert list(load(tmp_path / "mine.yaml")["tasks"]) == ["other"]


def test_shots_are_those_of_the_task_unless_given_and_zero_stays(file):
    def shots(**options):
        return load(file, **options)["tasks"]["mine"].get_config("num_fewshot")

    assert shots() == 0
    file = write(file.parent, CLOZE, num_fewshot=2, fewshot_split="train")
    assert (shots(), shots(shots=1)) == (2, 1)
    file = write(file.parent, CLOZE, num_fewshot=0)
    assert shots(shots=1) == 0


def test_a_task_that_asks_for_a_download(file):
    with pytest.raises(
        UsageError, match=r"mine\.json asks for a download: .*Give --download, or copy its data"
    ):
        load(write(file.parent, {**CLOZE, "dataset_path": "some/data"}, dataset_kwargs=None))


def test_a_shipped_task_that_asks_for_a_download():
    with pytest.raises(UsageError, match=r"The task arc_easy asks for a download"):
        load("arc_easy")


def test_an_unknown_task_names_the_nearest():
    assert {"hellaswag", "mmlu", "arc_easy"} <= shipped().keys()
    with pytest.raises(UsageError, match=r"no such task \(got 'helaswag'\)\. Did you mean 'hellaswag'\?"):
        load("helaswag")
    with pytest.raises(UsageError, match=r"no such task.*by its path: \./mine\.yaml"):
        load("qqqqqq")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken.yaml", "task: [", "cannot be read as a task: while parsing"),
        ("broken.json", "{", "cannot be read as a task"),
        ("list.yaml", "- a\n", "cannot be read as a task|is not a task"),
        ("none.yaml", "dataset_path: json\n", "names no `task` and no `group`"),
        (
            "odd.yaml",
            "task: odd\noutput_type: guess\n",
            "cannot be set up.*Invalid|cannot be set up.*invalid output_type",
        ),
        ("key.yaml", "task: odd\nquestion: 1\n", "cannot be set up.*question"),
        (
            "data.yaml",
            "task: odd\ndataset_path: json\ndataset_kwargs: {data_files: none.jsonl}\n",
            "data file none.jsonl of a task does not exist",
        ),
        (
            "metric.yaml",
            "task: odd\noutput_type: loglikelihood\nmetric_list: [{metric: acccc}]\n",
            r"a metric that lm-eval does not have by itself \(got 'acccc'\)",
        ),
    ],
)
def test_files_that_are_no_task(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        load(tmp_path / name)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"nothing\.yaml does not exist"):
        load(tmp_path / "nothing.yaml")


def test_python_code_in_a_file_runs_only_if_the_file_is_trusted(file, tmp_path):
    (tmp_path / "code.py").write_text(
        "print('code was run')\ndef text(doc):\n    return doc['question'].upper()\n"
    )
    (tmp_path / "code.yaml").write_text(
        json.dumps(json.loads(file.read_text())).replace(
            '"doc_to_text": "{{question}}"', '"doc_to_text": !function code.text'
        )
    )
    (tmp_path / "outer.yaml").write_text("include: code.yaml\ntask: outer\n")
    for name in ("code.yaml", "outer.yaml"):
        with pytest.raises(UsageError, match=r"code\.yaml runs Python code.*'code\.text'.*--trust-tasks"):
            load(tmp_path / name)
    task = load(tmp_path / "outer.yaml", trust_tasks=True)["tasks"]["outer"]
    assert task.doc_to_text({"question": "the dam"}) == "THE DAM"


def test_templates_reach_no_python_objects_unless_the_file_is_trusted(file):
    file = write(file.parent, {**CLOZE, "doc_to_text": EVIL})
    with pytest.raises(UsageError, match=r"cannot be set up \(SecurityError"):
        load(file)
    assert load(file, trust_tasks=True)["tasks"]


def test_a_task_named_twice(file):
    with pytest.raises(UsageError, match=r"named twice \(got 'mine'\)"):
        load(file, file)


def test_no_task():
    with pytest.raises(UsageError, match="no task to evaluate"):
        load()


def test_code_of_an_included_file_is_refused_whatever_its_name(tmp_path):
    """lm-eval reads an included file as YAML, with its tags, also if it is named .json."""
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(x): return x\n")
    (tmp_path / "base.json").write_text("process_docs: !function code.f\n")
    (tmp_path / "mine.yaml").write_text("include: base.json\ntask: other\n")
    with pytest.raises(UsageError, match=r"base\.json runs Python code: !function \(got 'code\.f'\)"):
        load(tmp_path / "mine.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dataset_path": "pandas"}, r"another program than a file's \(got 'pandas'\)"),
        ({"dataset_kwargs": {"trust_remote_code": True}}, "asks to run the program of a dataset"),
        ({"dataset_kwargs": {"data_files": "http://10.0.0.1/x.jsonl"}}, r"address \(got 'http://10\.0\.0\.1"),
        (
            {"dataset_kwargs": {"data_files": {"test": ["zip://x::http://10.0.0.1/x"]}}},
            "data from an address",
        ),
    ],
    ids=["unpickles", "script", "address", "chain"],
)
def test_data_that_runs_code_or_lies_elsewhere_is_refused(tmp_path, more, message):
    (tmp_path / "docs.jsonl").write_text(json.dumps({"question": "the dam", "choices": ["flows"]}) + "\n")
    with pytest.raises(UsageError, match=message):
        load(write(tmp_path, CLOZE, **more))
