"""Appending to a corpus: one part more, all or nothing, whatever is killed when."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CorpusError, InputError, RunLocked, UsageError
from penstock.core.files import exclusive
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.data.prepare import PrepareConfig, Selection, Summary
from penstock.data.prepare import append as append_module
from penstock.data.prepare.append import Appended, append, tokenizer_of
from penstock.data.tools.verify import verify
from tests.unit.data.test_prepare_resume import Killed, kill_at

Run = Callable[..., Summary]
Content = Callable[[Path], dict[str, bytes]]


@pytest.fixture
def corpus(run: Run, inputs: Path, tmp_path: Path, tokenizer: Path) -> Path:
    run(inputs, tmp_path / "corpus", tokenizer)
    return tmp_path / "corpus"


@pytest.fixture
def news(tmp_path: Path) -> Path:
    path = tmp_path / "news.jsonl"
    lines = [json.dumps({"text": f"the dog sat {i}"}) for i in range(9)]
    path.write_text("\n".join([*lines, "{broken"]))
    return path


def added(corpus: Path, *paths: Path, restart: bool = False, **options: Any) -> Appended:
    config = PrepareConfig(
        tokenizer=tokenizer_of(corpus, None), **{"shard_tokens": 40, "max_errors": 2, **options}
    )
    selection = Selection(suffixes=(".jsonl",))
    return append(corpus, list(map(str, paths)), config=config, selection=selection, restart=restart)


def visible(content: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in content.items() if not name.startswith(".")}


def test_what_is_appended_is_one_new_part_and_the_rest_stays(
    corpus: Path, content: Content, news: Path
) -> None:
    before, files = load_manifest(corpus), content(corpus)
    done = added(corpus, news)
    after = load_manifest(corpus)
    assert after == done.corpus
    assert after.first_parts(1).fingerprint == before.fingerprint != after.fingerprint
    assert after.part_ends == (len(before.shards), len(after.shards))
    assert after.num_documents == before.num_documents + 9
    assert after.text_bytes == before.text_bytes + done.added.manifest.text_bytes
    assert after.rejected == before.rejected + 1
    assert json.loads((corpus / "rejected-1.jsonl").read_text())["kind"] == "broken_json"
    kept = {name: data for name, data in files.items() if name != "manifest.json"}
    assert kept.items() <= content(corpus).items()
    assert not verify(corpus).faults
    assert not (corpus / ".append").exists()


def test_the_same_inputs_may_be_appended_twice(corpus: Path, news: Path) -> None:
    first, second = added(corpus, news), added(corpus, news)
    assert len(second.corpus.part_ends) == 3
    assert second.corpus.first_parts(2).fingerprint == first.corpus.fingerprint
    assert (first.same_as, second.same_as) == (None, 1), "which is said"


def test_a_kill_at_any_durable_step_leaves_the_old_or_the_new_and_a_resume_makes_it_new(
    run: Run, content: Content, inputs: Path, tmp_path: Path, tokenizer: Path, news: Path
) -> None:
    run(inputs, tmp_path / "whole", tokenizer)
    old = load_manifest(tmp_path / "whole")
    new = added(tmp_path / "whole", news, shard_tokens=90).corpus
    expected = visible(content(tmp_path / "whole"))
    for step in range(1, 1000):
        out = tmp_path / f"out{step}"
        run(inputs, out, tokenizer)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, step)
            try:
                added(out, news, shard_tokens=90)
            except Killed:
                pass
            else:
                break
        assert load_manifest(out) in (old, new), f"killed at step {step}"
        assert added(out, news, shard_tokens=90).corpus == new, f"killed at step {step}"
        assert visible(content(out)) == expected, f"killed at step {step}"
    assert step > 25


def killed_before_the_cleaning(corpus: Path, news: Path) -> None:
    def kill(_: Path) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_module, "remove_tree", kill)
        with pytest.raises(Killed):
            added(corpus, news)


def test_other_inputs_may_follow_an_append_that_was_killed_after_it_was_done(
    corpus: Path, news: Path, tmp_path: Path
) -> None:
    killed_before_the_cleaning(corpus, news)
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "and a mat"}\n')
    assert len(added(corpus, other).corpus.part_ends) == 3


def test_an_append_that_was_done_is_not_done_again_by_restart(corpus: Path, news: Path) -> None:
    killed_before_the_cleaning(corpus, news)
    assert len(added(corpus, news, restart=True).corpus.part_ends) == 2


def test_an_unfinished_append_of_other_inputs_must_be_continued_or_restarted(
    corpus: Path, news: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="Rejected inputs: 1"):
        added(corpus, news, max_errors=0)
    assert len(load_manifest(corpus).part_ends) == 1
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "and a mat"}\n')
    with pytest.raises(CorpusError, match=r"\.append contains a half done corpus .*input removed.*--restart"):
        added(corpus, other)
    assert added(corpus, other, restart=True).corpus.part_ends[-1] == load_manifest(corpus).part_ends[0] + 1


def test_a_corpus_inside_its_input_does_not_read_itself(corpus: Path, news: Path, tmp_path: Path) -> None:
    done = added(corpus, tmp_path, max_errors=9)
    assert done.added.manifest.num_documents == 10 + 9, "c.jsonl and news.jsonl, not corpus/inputs.jsonl"
    assert news.parent == tmp_path


def test_a_corpus_that_is_being_prepared_is_refused(corpus: Path, news: Path) -> None:
    save_manifest(corpus, replace(load_manifest(corpus), streamed_parts=0))
    with pytest.raises(CorpusError, match=r"is still being prepared\. Let `penstock data prepare` finish"):
        added(corpus, news)


def test_a_corpus_that_another_process_writes_is_refused(corpus: Path, news: Path) -> None:
    with exclusive(corpus, purpose="test"), pytest.raises(RunLocked, match="another process"):
        added(corpus, news)


def test_a_corpus_of_another_format_is_refused(corpus: Path, news: Path) -> None:
    save_manifest(corpus, replace(load_manifest(corpus), format="mds"))
    with pytest.raises(CorpusError, match="has format mds; only Penstock's own"):
        added(corpus, news)


def test_a_corpus_without_its_tokenizer_takes_the_same_one_and_no_other(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    (corpus / "tokenizer.json").unlink()
    with pytest.raises(CorpusError, match=r"has no tokenizer\.json\. Give the one .*--tokenizer"):
        tokenizer_of(corpus, None)
    with pytest.raises(UsageError, match="does not exist"):
        tokenizer_of(corpus, tmp_path / "none.json")
    other = tmp_path / "other.json"
    other.write_text(tokenizer.read_text().replace("Ġthe", "Ġthx"))
    with pytest.raises(CorpusError, match=r"is not the tokenizer that corpus .* was made with: its checksum"):
        tokenizer_of(corpus, other)
    assert tokenizer_of(corpus, tokenizer) == tokenizer
    save_manifest(corpus, replace(load_manifest(corpus), tokenizer=None))
    with pytest.raises(CorpusError, match="does not record which tokenizer it was made with"):
        tokenizer_of(corpus, tokenizer)


def test_prepare_restart_deletes_what_was_appended(
    run: Run, content: Content, inputs: Path, tokenizer: Path, corpus: Path, news: Path
) -> None:
    before = content(corpus)
    added(corpus, news)
    run(inputs, corpus, tokenizer, restart=True)
    assert content(corpus) == before
