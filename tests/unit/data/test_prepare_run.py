"""A preparation from end to end in one process: results, refusals, restarts."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from penstock.cli.data.prepare import as_text
from penstock.core.errors import CorpusChanged, InputError, RunLocked, UsageError
from penstock.core.files import exclusive
from penstock.data.prepare import Summary
from penstock.data.prepare import train_tokenizer as sample_module
from penstock.text.tokenizer import Tokenizer

Run = Callable[..., Summary]
Content = Callable[[Path], dict[str, bytes]]


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, object]]:
    """Return the name and the source of each event."""
    return [(record.msg.name, record.msg.values["source"]) for record in caplog.records]  # type: ignore[attr-defined]


def documents(out: Path) -> list[list[int]]:
    """Read a corpus with nothing but pyarrow."""
    lists: list[list[int]] = []
    for path in sorted(out.glob("shard-*.arrow")):
        with pa.memory_map(str(path)) as source:
            lists += pa.ipc.open_file(source).read_all().column("tokens").to_pylist()
    return lists


def test_the_corpus_holds_the_documents_in_order_each_with_the_end_token(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    summary = run(inputs, tmp_path / "out", tokenizer)
    encoder = Tokenizer.load(tokenizer)
    words = (inputs / "a.txt").read_text()
    texts = [words, *(words[: 5 + i] for i in range(10)), "last"]
    assert documents(tmp_path / "out") == [[*encoder.encode(text), 0] for text in texts]
    assert summary.rejected == {"empty": 1, "broken_json": 1}
    assert summary.manifest.text_bytes == sum(map(len, texts))
    assert all(shard.tokens <= 40 for shard in summary.manifest.shards)


def test_rejected_inputs_are_listed_with_source_line_and_reason(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    run(inputs, tmp_path / "out", tokenizer)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(Path(row["source"]).name, row.get("line"), row["kind"]) for row in rows] == [
        ("b.txt", None, "empty"),
        ("c.jsonl", 5, "broken_json"),
    ]
    assert "Expecting property name" in rows[1]["reason"]


def test_too_many_rejections_name_the_value_to_pass_and_passing_it_finishes_at_once(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(
        InputError,
        match=r"Rejected inputs: 1 .broken json: 1.*c.jsonl, line 5: Expecting .*--max-errors 1 to",
    ):
        run(inputs, out, tokenizer, max_errors=0)
    assert not (out / "manifest.json").exists()
    assert len((out / "rejected.jsonl").read_text().splitlines()) == 2
    monkeypatch.setattr(Tokenizer, "encode_batch", None)  # nothing is tokenised again
    assert run(inputs, out, tokenizer, max_errors=1).manifest.rejected == 2


def test_documents_without_text_are_left_out_and_counted_and_are_no_errors(
    run: Run, tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("")
    (tmp_path / "in" / "b.jsonl").write_text('{"text": ""}\n{"text": "some"}\n{"text": null}\n')
    pq.write_table(pa.table({"text": ["", "more", None]}), tmp_path / "in" / "c.parquet")
    suffixes = (".txt", ".jsonl", ".parquet")
    done = run(tmp_path / "in", tmp_path / "out", tokenizer, max_errors=0, suffixes=suffixes)
    assert done.rejected == {"empty": 5}
    encoder = Tokenizer.load(tokenizer)
    assert documents(tmp_path / "out") == [[*encoder.encode(text), 0] for text in ("some", "more")]
    lines = list(as_text(tmp_path / "out", done, seconds=1.0, new_tokens=1))
    assert f"  left out     5 documents without text, listed in {tmp_path}/out/rejected.jsonl" in lines
    assert not any("rejected  " in line for line in lines)


def test_when_every_input_is_rejected_there_is_no_corpus(run: Run, tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    for _ in range(2):
        with pytest.raises(InputError, match=r"No document was accepted; rejected: 1 \(empty: 1\)"):
            run(tmp_path / "a.txt", tmp_path / "out", tokenizer, max_errors=9)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("max_errors", [0, 9])
def test_parquet_files_without_the_column_are_refused_before_anything_is_written(
    run: Run, tmp_path: Path, tokenizer: Path, max_errors: int
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        pq.write_table(pa.table({"id": [1], "body of it": ["x"]}), tmp_path / "in" / f"{name}.parquet")
    with pytest.raises(
        UsageError,
        match=r"'text'; .*a.parquet has: id \(int64\), body of it \(string\).*--text-column 'body of it'",
    ):
        run(tmp_path / "in", tmp_path / "out", tokenizer, max_errors=max_errors, suffixes=(".parquet",))
    assert not (tmp_path / "out").exists()


def test_one_parquet_file_with_the_column_is_enough_to_begin(
    run: Run, tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "in" / "a.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "in" / "b.parquet")
    done = run(tmp_path / "in", tmp_path / "out", tokenizer, suffixes=(".parquet",))
    assert (done.manifest.num_documents, done.rejected) == (1, {"missing_field": 1})


def test_lines_without_the_field_end_with_the_first_of_them_and_the_option(
    run: Run, tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "n": 1}\n' * 3)
    with pytest.raises(
        InputError, match=r"first is .*a.jsonl, line 1: no field 'text'; the line has: body, n.*--text-column"
    ):
        run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, max_errors=9)


@pytest.mark.parametrize(
    ("name", "content", "warned"),
    [
        ("a.txt", "\n<!doctype HTML>\n<title>x</title>", True),
        ("a.jsonl", json.dumps({"text": "<!-- saved --> <html lang=en>"}), True),
        ("a.htm", "<p>a part of a page", True),
        ("a.txt", "the <html> tag comes first", False),
        ("a.xml", "<?xml version='1.0'?><feed/>", False),
    ],
)
def test_html_that_is_stored_with_its_tags_is_warned_about_once(
    run: Run,
    tmp_path: Path,
    tokenizer: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: str,
    warned: bool,
) -> None:
    (tmp_path / "in").mkdir()
    for folder in ("x", "y"):
        (tmp_path / "in" / folder).mkdir()
        (tmp_path / "in" / folder / name).write_text(content)
    run(tmp_path / "in", tmp_path / "out", tokenizer, suffixes=(Path(name).suffix,), html="keep")
    place = f"{tmp_path}/in/x/{name}{' (record 1)' if name.endswith('.jsonl') else ''}"
    assert events(caplog) == ([("html_as_text", place)] if warned else [])


def test_html_that_is_extracted_is_told_once(
    run: Run, tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.html", "b.html"):
        (tmp_path / "in" / name).write_text(
            "<html><body><p>The penstock feeds the turbine.</p></body></html>"
        )
    caplog.set_level("INFO", "penstock.data")
    summary = run(tmp_path / "in", tmp_path / "out", tokenizer, suffixes=(".html",))
    assert summary.manifest.text_bytes == 2 * len("The penstock feeds the turbine.")
    assert events(caplog) == [("html_extracted", f"{tmp_path}/in/a.html")]


PARTS = (
    '<div class="nav"><a href="/">Home</a><p>Penstocks</p></div><script>track()</script>',
    "<p>How do I <b>x</b>?</p>\n<pre><code>x()</code></pre>",
    "\n<!-- a --> <H1 align=center>Penstocks</H1>",
)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_page_is_stored_with_its_tags_and_warned_about_once(
    run: Run, tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    page = "<html><body><p>The penstock feeds the turbine.</p></body></html>"
    texts = ["a < b", "<paper> is no tag", page, part, *PARTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    summary = run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer)
    assert summary.manifest.num_documents == len(texts)
    assert events(caplog) == [
        ("html_extracted", f"{tmp_path}/a.jsonl (record 3)"),
        ("html_part_as_text", f"{tmp_path}/a.jsonl (record 4)"),
    ]
    assert "put <html> in front of each" in caplog.records[-1].getMessage()
    caplog.clear()
    run(tmp_path / "a.jsonl", tmp_path / "kept", tokenizer, html="keep")
    assert events(caplog) == [("html_as_text", f"{tmp_path}/a.jsonl (record 3)")]
    (tmp_path / "a.vue").write_text(part)
    caplog.clear()
    run(tmp_path / "a.vue", tmp_path / "code", tokenizer, suffixes=(".vue",))
    assert not caplog.records


def half_done(run: Run, inputs: Path, out: Path, tokenizer: Path) -> None:
    with pytest.raises(InputError):
        run(inputs, out, tokenizer, max_errors=0)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_tokens": 50}, "--shard-tokens was 40, now 50"),
        ({"text_column": "body"}, "--text-column was text, now body"),
        ({"html": "keep"}, "--html was unset, now keep"),
        ({"max_document_bytes": 7}, "--max-document-bytes was 268435456, now 7"),
        ({"tokenizer": None, "train_tokenizer": 300}, "--train-tokenizer was unset, now 300"),
    ],
)
def test_other_arguments_on_the_same_folder_say_what_differs(
    run: Run,
    inputs: Path,
    tmp_path: Path,
    tokenizer: Path,
    finished: bool,
    change: dict[str, object],
    message: str,
) -> None:
    if finished:
        run(inputs, tmp_path / "out", tokenizer)
    else:
        half_done(run, inputs, tmp_path / "out", tokenizer)
    state = "finished" if finished else "half done"
    with pytest.raises(CorpusChanged, match=rf"contains a {state} corpus .*{message}.*--restart"):
        run(inputs, tmp_path / "out", **{"tokenizer": tokenizer, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [("touch", "changed"), ("grow", "changed"), ("add", "added"), ("remove", "removed")],
)
def test_changed_inputs_of_a_half_done_folder_are_named(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path, change: str, message: str
) -> None:
    half_done(run, inputs, tmp_path / "out", tokenizer)
    match change:
        case "touch":
            os.utime(inputs / "d.txt", ns=(1, 1))
        case "grow":
            (inputs / "d.txt").write_text("longer")
        case "add":
            (inputs / "e.txt").write_text("new")
        case "remove":
            (inputs / "d.txt").unlink()
    with pytest.raises(CorpusChanged, match=rf"input {message}: .*/in/[de]\.txt"):
        run(inputs, tmp_path / "out", tokenizer)


def test_restart_replaces_a_corpus_of_another_plan_entirely(
    run: Run, content: Content, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    run(inputs, tmp_path / "out", tokenizer, shard_tokens=5)
    (tmp_path / "out" / "notes.md").write_text("mine")
    run(inputs, tmp_path / "out", tokenizer, restart=True)
    run(inputs, tmp_path / "whole", tokenizer)
    assert content(tmp_path / "out") == {**content(tmp_path / "whole"), "notes.md": b"mine"}


def test_a_finished_folder_with_the_same_plan_is_left_as_it_is(
    run: Run, content: Content, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    first = run(inputs, tmp_path / "out", tokenizer)
    before = content(tmp_path / "out")
    again = run(inputs, tmp_path / "out", tokenizer, max_errors=0)
    assert (first.already_complete, again.already_complete) == (False, True)
    assert again.rejected == first.rejected
    assert content(tmp_path / "out") == before


def test_the_given_tokenizer_may_lie_in_the_output_even_on_restart(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    own = tmp_path / "out" / "tokenizer.json"
    own.parent.mkdir()
    own.write_bytes(tokenizer.read_bytes())
    run(inputs, tmp_path / "out", own)
    run(inputs, tmp_path / "out", own, restart=True)
    assert own.read_bytes() == tokenizer.read_bytes()


def test_a_corpus_of_unknown_origin_is_not_overwritten(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    run(inputs, tmp_path / "out", tokenizer)
    (tmp_path / "out" / "inputs.jsonl").unlink()
    with pytest.raises(UsageError, match=r"corpus of unknown origin \(manifest\.json\)"):
        run(inputs, tmp_path / "out", tokenizer)


def test_two_preparations_of_one_folder_refuse(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    with exclusive(tmp_path / "out", purpose="test"), pytest.raises(RunLocked, match="another process"):
        run(inputs, tmp_path / "out", tokenizer)


def test_the_output_may_not_be_an_input_or_a_file(run: Run, inputs: Path, tokenizer: Path) -> None:
    with pytest.raises(UsageError, match="is also an input"):
        run(inputs, inputs, tokenizer)
    with pytest.raises(UsageError, match="is a file"):
        run(inputs, inputs / "a.txt", tokenizer)


@pytest.mark.parametrize(("largest", "dtype"), [(65535, "uint16"), (65536, "uint32")])
def test_tokens_are_stored_in_two_bytes_where_they_fit(
    run: Run, tmp_path: Path, largest: int, dtype: str
) -> None:
    model = tokenizers.models.WordLevel({"<eos>": 0, "text": largest}, unk_token="<eos>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("text")
    manifest = run(tmp_path / "a.txt", tmp_path / "out", tmp_path / "t.json").manifest
    assert (manifest.dtype, manifest.vocab_size) == (dtype, largest + 1)
    assert documents(tmp_path / "out") == [[largest, 0]]


def test_a_tokenizer_is_trained_on_a_bounded_sample(
    run: Run, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    train = sample_module.train_tokenizer

    def spy(texts: object, *, vocab_size: int) -> Tokenizer:
        seen.extend(texts)  # type: ignore[call-overload]
        return train(seen, vocab_size=vocab_size)

    monkeypatch.setattr(sample_module, "train_tokenizer", spy)
    monkeypatch.setattr(sample_module, "SAMPLE_BYTES", 100)
    run(inputs, tmp_path / "out", None, train_tokenizer=300)
    assert 0 < sum(map(len, seen)) <= 100
