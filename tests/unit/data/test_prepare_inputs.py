"""Finding input files: byte order, what counts, what is passed over and counted."""

import os
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.core.errors import UsageError
from penstock.data.prepare.inputs import Selection, find_inputs, kind_of, shown


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")


def names(folder: Path, selection: Selection | None = None) -> list[str]:
    files, _ = find_inputs([str(folder)], selection or Selection())
    return [os.path.relpath(file.path, folder) for file in files]


def test_a_folder_is_walked_in_byte_order_depth_first(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "a/z.py", "a/b/c.md", "B.txt", "é.txt", "a.txt")
    assert names(tmp_path) == ["B.txt", "a/b/c.md", "a/z.py", "a.txt", "b.txt", "é.txt"]


def test_exclusions_match_names_of_files_and_folders_and_paths_with_a_slash(tmp_path: Path) -> None:
    write(tmp_path, "keep.py", "tests/a.py", "x/tests/b.py", "x/keep.min.js", "x/y/z.py", "y/z.py")
    selection = Selection(exclude=("tests", "*.min.js", "x/y"))
    assert names(tmp_path, selection) == ["keep.py", "y/z.py"]


def test_what_is_passed_over_is_counted_by_reason(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.PNG", "c.PNG", "none", ".hidden/x.py", "no/y.py")
    (tmp_path / "link").symlink_to(tmp_path / "no")
    _, skipped = find_inputs([str(tmp_path)], Selection(exclude=("no",)))
    assert skipped == {
        "suffix .png": 2,
        "suffix none": 1,
        "names that start with a dot": 1,
        "excluded": 1,
        "links to folders": 1,
    }


def test_every_kind_that_can_be_read_counts_in_a_folder(tmp_path: Path) -> None:
    found = ["a.jsonl", "b.jsonl.gz", "c.JSONL.zst", "d.ndjson", "e.parquet", "f.txt.zst"]
    packed_text = ["i.rst.gz", "j.MD.zst", "k.tar.py.gz", "l.htm.zst"]
    write(tmp_path, *found, *packed_text, "g.json", "h.csv.gz", "m.parquet.gz", "n.txt.bz2")
    assert names(tmp_path) == [*found, *packed_text]
    _, skipped = find_inputs([str(tmp_path)], Selection())
    assert skipped == {"suffix .json": 1, "suffix .csv.gz": 1, "suffix .parquet.gz": 1, "suffix .txt.bz2": 1}


@pytest.mark.parametrize("path", ["", "absent"])
def test_a_path_to_nothing_is_named(path: str) -> None:
    with pytest.raises(UsageError, match="is an empty path" if not path else "absent does not exist"):
        find_inputs([path], Selection())


def test_a_link_to_nowhere_is_kept_so_that_it_is_listed_as_unreadable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "absent")
    assert names(tmp_path) == ["a.txt"]


def test_the_output_inside_an_input_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "out/b.txt")
    assert names(tmp_path, Selection(never=tmp_path / "out")) == ["a.txt"]


def test_a_named_file_counts_whatever_its_suffix(tmp_path: Path) -> None:
    write(tmp_path, "LICENSE")
    files, _ = find_inputs([str(tmp_path / "LICENSE")], Selection())
    assert [file.kind for file in files] == ["text"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl", "jsonl"), ("a.ndjson.gz", "jsonl"), ("a.parquet", "parquet"), ("a.json", "text")],
)
def test_the_reader_follows_the_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_missing_input_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent does not exist"):
        find_inputs([str(tmp_path / "absent")], Selection())


def test_a_folder_without_matching_files_says_what_it_has(tmp_path: Path) -> None:
    write(tmp_path, "a.tar.gz", "b.TAR.gz")
    with pytest.raises(UsageError, match=r"omitted: suffix \.tar\.gz: 2.*--suffix"):
        find_inputs([str(tmp_path)], Selection())


def test_an_empty_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No input file in .* \(empty\)"):
        find_inputs([str(tmp_path)], Selection())


def test_naming_a_file_twice_is_a_usage_error(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    with pytest.raises(UsageError, match=r"a\.txt is given twice"):
        find_inputs([str(tmp_path), str(tmp_path / "a.txt")], Selection())


def test_a_pipe_is_not_an_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UsageError, match=r"neither a file nor a folder"):
        find_inputs([str(tmp_path / "a.txt")], Selection())


def test_a_file_name_that_is_no_text_can_be_shown() -> None:
    assert shown(os.fsdecode(b"a\xff.txt")) == "a\\xff.txt"


def dataset(folder: Path, **columns: list[object]) -> str:
    """Write a dataset as Hugging Face's library saves it."""
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (folder / "cache-1.arrow").write_text("of datasets.map")
    table = pa.table(columns)
    path = folder / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return str(path)


@pytest.mark.parametrize("named", ["set", "set/train", "set/train/data-00000-of-00001.arrow"])
def test_of_a_dataset_of_text_only_the_rows_for_training_are_read(tmp_path: Path, named: str) -> None:
    dataset(tmp_path / "set" / "test", story=["once"])
    path = dataset(tmp_path / "set" / "train", story=["once"], id=[1])
    files, skipped = find_inputs([str(tmp_path / named)], Selection())
    assert [(file.path, file.kind) for file in files] == [(path, "arrow")]
    assert skipped["splits other than train"] == (named == "set")


def test_a_dataset_of_several_splits_without_train_is_refused(tmp_path: Path) -> None:
    for split in ("a", "b"):
        dataset(tmp_path / "set" / split, story=["once"])
    assert len(find_inputs([str(tmp_path / "set")], Selection())[0]) == 2, "folders of any name are all read"
    (tmp_path / "set" / "dataset_dict.json").write_text("{}")
    with pytest.raises(UsageError, match=r"2 splits, and which .* \(got 'a, b'\)\. Name the folder"):
        find_inputs([str(tmp_path / "set")], Selection())


@pytest.mark.parametrize("named", ["set", "set/data-00000-of-00001.arrow"])
def test_a_dataset_of_token_ids_is_no_input_but_a_corpus(tmp_path: Path, named: str) -> None:
    dataset(tmp_path / "set", input_ids=[[1, 2]])
    with pytest.raises(
        UsageError, match=r"input_ids \(list<.*its folder is a corpus as it is: `penstock data"
    ):
        find_inputs([str(tmp_path / named)], Selection())
