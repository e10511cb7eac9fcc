"""Columns beside tokens: files, refusals, and the tools that read them."""

import json
import shutil

import numpy as np
import pytest

from penstock.core.errors import ConfigError, CorpusError, TransformError, UsageError
from penstock.data import Loader, open_corpus
from penstock.data.corpus.columns import ColumnWriter, read_index
from penstock.data.corpus.manifest import ColumnEntry, load_manifest, save_manifest
from penstock.data.tools.convert import convert
from penstock.data.tools.verify import verify
from penstock.data.transforms import FillInTheMiddle
from penstock.testing.corpora import write_corpus
from tests.integration.remote.faulty import serving
from tests.integration.remote.setting import quick_options

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9], [], [10, 11, 12, 13]] * 30
LEARNED = [[token % 2 == 0 for token in document] for document in DOCUMENTS]
LOADER = {"sequence_length": 8, "global_batch_size": 4, "deliver": "numpy", "num_workers": 0}


@pytest.fixture
def flagged(tmp_path):
    return write_corpus(tmp_path / "flagged", DOCUMENTS, documents_per_shard=40, columns={"learned": LEARNED})


@pytest.fixture
def plain(tmp_path):
    return write_corpus(tmp_path / "plain", DOCUMENTS, documents_per_shard=40)


def test_a_corpus_without_columns_has_the_manifest_it_always_had(plain):
    stored = json.loads((plain / "manifest.json").read_text())
    assert "columns" not in stored
    assert all("columns" not in shard for shard in stored["shards"])


def test_the_fingerprint_covers_the_columns(flagged, plain, tmp_path):
    other = [[not bit for bit in document] for document in LEARNED]
    changed = write_corpus(tmp_path / "other", DOCUMENTS, documents_per_shard=40, columns={"learned": other})
    prints = {load_manifest(folder).fingerprint for folder in (flagged, plain, changed)}
    assert len(prints) == 3


def test_learned_tokens_are_counted_in_the_manifest(flagged, plain):
    assert load_manifest(flagged).count("learned") == sum(map(sum, LEARNED))
    assert load_manifest(plain).count("learned") is None


def test_verify_finds_an_altered_a_shortened_and_a_missing_column(flagged):
    assert not verify(flagged).faults
    files = sorted(flagged.glob("*.learned"))
    content = files[0].read_bytes()
    files[0].write_bytes(bytes([content[0] ^ 1]) + content[1:])
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].unlink()
    found = {fault.file: fault.problem for fault in verify(flagged).faults}
    assert "altered" in found[files[0].name]
    assert "bytes" in found[files[1].name]
    assert "missing" in found[files[2].name]


def test_a_loader_refuses_a_column_that_was_replaced(flagged):
    file = min(flagged.glob("*.learned"))
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(CorpusError, match="differs from the one listed"):
        Loader({"c": flagged}, **LOADER).batch_at(0)


def test_a_part_without_the_column_is_refused(flagged):
    manifest = json.loads((flagged / "manifest.json").read_text())
    manifest["shards"][-1]["columns"] = []
    (flagged / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match="Every part of a corpus has the same columns"):
        open_corpus(flagged)


def test_converting_keeps_the_columns_in_other_shards(flagged, tmp_path):
    made = convert(flagged, tmp_path / "again", to="arrow", shard_tokens=100)
    assert len(made.shards) > len(load_manifest(flagged).shards)
    assert not verify(tmp_path / "again").faults
    assert made.count("learned") == load_manifest(flagged).count("learned")
    found = open_corpus(tmp_path / "again")
    for index in range(len(made.shards)):
        tokens = found.shard(index).tokens[0 : made.shards[index].tokens]
        assert (found.columns["learned"].values(index, 0, len(tokens)) == (tokens % 2 == 0)).all()


def test_other_formats_are_refused_for_a_corpus_with_columns(flagged, tmp_path):
    with pytest.raises(CorpusError, match="would train on every token"):
        convert(flagged, tmp_path / "again", to="megatron")


def test_a_remote_column_is_read_in_place(flagged, tmp_path, monkeypatch):
    local = Loader({"c": flagged}, **LOADER)
    options = quick_options(tmp_path / "cache")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    from penstock.storage import remote

    monkeypatch.setattr(remote, "RemoteOptions", lambda: options)
    with serving(flagged) as server:
        far = Loader({"c": server.url}, fields=("labels", "learned"), **LOADER)
        for step in range(3):
            want, got = local.batch_at(step)["labels"], far.batch_at(step)
            assert got["labels"].tolist() == want.tolist()
            assert (got["learned"] == (want != -100)).all()


def test_torch_delivers_columns_and_samples(flagged):
    options = {**LOADER, "deliver": "torch"}
    loader = Loader({"c": flagged}, fields=("labels", "learned"), **options)
    sample = loader.dataset[1]
    assert sample["learned"].dtype.is_floating_point is False
    assert ((sample["labels"] != -100) == sample["learned"]).all()
    batch = next(iter(loader.stream(1)))
    assert batch["learned"].shape == (4, 8)


def test_a_field_that_a_corpus_lacks_is_refused(flagged, plain):
    with pytest.raises(ConfigError, match="no such field"):
        Loader({"c": plain}, fields=("rejected",), **LOADER)
    columns = {"rejected": LEARNED}
    pairs = write_corpus(plain.parent / "pairs", DOCUMENTS, columns=columns)
    with pytest.raises(ConfigError, match="Corpus 'web' has no column 'rejected'"):
        Loader({"pairs": pairs, "web": flagged}, fields=("rejected",), **LOADER).batch_at(0)


def test_a_column_of_another_width_in_another_corpus_is_refused(tmp_path):
    folders = {}
    for name, width in (("a", 2), ("b", 3)):
        corpus = write_corpus(tmp_path / name, DOCUMENTS)
        entry = ColumnEntry(name="top", dtype="int32", width=width)
        with ColumnWriter(tmp_path / f"{name}-top", open_corpus(corpus).manifest, [entry]):
            folders[name] = tmp_path / f"{name}-top"
    with pytest.raises(ConfigError, match="'top' has 2 int32 a token in corpus 'a', and 3 int32 in 'b'"):
        Loader({name: tmp_path / name for name in "ab"}, columns=folders, fields=("top",), **LOADER)


def test_a_transform_may_not_label_what_is_not_learned(flagged, plain):
    fill = FillInTheMiddle(prefix_id=20, middle_id=21, suffix_id=22, rate=1.0)
    Loader({"c": plain}, transform=fill, **LOADER).batch_at(0)
    with pytest.raises(TransformError, match="marks as not learned"):
        Loader({"c": flagged}, transform=fill, **LOADER).batch_at(0)


def reference(folder, corpus, **options):
    entry = ColumnEntry(name="reference", dtype="float32")
    manifest = open_corpus(corpus).manifest
    with ColumnWriter(folder, manifest, [entry], **options) as writer:
        writer.put("reference", 0, np.arange(manifest.num_tokens))
    return folder


def test_attached_columns_know_their_corpus(flagged, plain, tmp_path):
    folder = reference(tmp_path / "columns", plain, made_with={"model": "abc"})
    assert read_index(folder).made_with == {"model": "abc"}
    with pytest.raises(CorpusError, match="Make them again"):
        Loader({"c": flagged}, columns={"c": folder}, **LOADER)
    with pytest.raises(ConfigError, match="unknown corpus"):
        Loader({"c": plain}, columns={"d": folder}, **LOADER)
    with pytest.raises(UsageError, match="exists"):
        reference(folder, plain)
    loader = Loader({"c": plain}, columns={"c": folder}, fields=("reference",), **LOADER)
    assert loader.state_dict() == Loader({"c": plain}, **LOADER).state_dict()
    import pickle

    again = pickle.loads(pickle.dumps(loader))
    assert (again.batch_at(1)["reference"] == loader.batch_at(1)["reference"]).all()


def test_several_writers_fill_one_folder(plain, tmp_path):
    manifest = open_corpus(plain).manifest
    kinds = [ColumnEntry(name="reference", dtype="float32")]
    last = ColumnWriter(tmp_path / "columns", manifest, kinds)
    half = manifest.num_tokens // 2
    with ColumnWriter(tmp_path / "columns", manifest, kinds, finishes=False) as first:
        first.put("reference", 0, np.ones(half))
    last.put("reference", half, np.full(manifest.num_tokens - half, 2.0))
    last.close()
    column = open_corpus(plain, columns=tmp_path / "columns").columns["reference"]
    found = np.concatenate([column.values(i, 0, s.tokens) for i, s in enumerate(manifest.shards)])
    assert found.tolist() == [1.0] * half + [2.0] * (manifest.num_tokens - half)


def test_a_failed_writer_leaves_nothing(plain, tmp_path):
    manifest = open_corpus(plain).manifest
    kinds = [ColumnEntry(name="reference", dtype="float32")]
    with pytest.raises(UsageError, match="tokens"), ColumnWriter(tmp_path / "x", manifest, kinds) as writer:
        writer.put("reference", manifest.num_tokens, np.ones(1))
    assert not list(tmp_path.glob("*x*"))


def test_a_manifest_that_names_a_column_outside_is_refused(flagged):
    manifest = json.loads((flagged / "manifest.json").read_text())
    manifest["shards"][0]["columns"][0]["name"] = "../secret"
    (flagged / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpusError, match="outside the corpus"):
        open_corpus(flagged)


def test_a_moved_corpus_keeps_its_columns(flagged, tmp_path):
    before = load_manifest(flagged).fingerprint
    shutil.move(flagged, tmp_path / "moved")
    save_manifest(tmp_path / "moved", load_manifest(tmp_path / "moved"))
    assert load_manifest(tmp_path / "moved").fingerprint == before
    Loader({"c": tmp_path / "moved"}, **LOADER).batch_at(0)
