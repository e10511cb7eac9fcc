"""Every reader of a binary format on damaged files: an error that names the file, or tokens; nothing else.

A file that was mutated may still be a sound one of other tokens: then it must read like one. What must not
happen is another exception, a read outside the file, or memory that the file's own size does not justify.
"""

import shutil
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.core.errors import PenstockError
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.open import open_corpus
from penstock.data.formats import FORMATS
from penstock.testing.corpora import write_corpus
from tests.examples import examples
from tests.format_examples import DATA, DOCUMENTS, EXAMPLES, Example

OWN = Example("arrow", "")
FUZZED = [OWN, *EXAMPLES]
EXTREMES = [
    0,
    1,
    2,
    127,
    128,
    255,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
MANIFEST = "manifest.json"
MEMORY = 64 * 2**20  # a few KB of corpus: anything like this is a count believed

flip = st.tuples(st.just("flip"), st.integers(0, 2**16), st.integers(1, 255))
cut = st.tuples(st.just("cut"), st.integers(0, 2**16), st.integers(1, 64))
insert = st.tuples(st.just("insert"), st.integers(0, 2**16), st.binary(min_size=1, max_size=40))
truncate = st.tuples(st.just("truncate"), st.integers(0, 2**16), st.none())
extreme = st.tuples(st.just("extreme"), st.integers(0, 80) | st.integers(0, 2**16), st.sampled_from(EXTREMES))
MUTATIONS = st.lists(flip | cut | insert | truncate | extreme, min_size=1, max_size=4)


def mutated(content: bytes, mutations: list) -> bytes:
    data = bytearray(content)
    for kind, place, what in mutations:
        at = place % (len(data) + 1)
        if kind == "flip" and at < len(data):
            data[at] ^= what
        elif kind == "cut":
            del data[at : at + what]
        elif kind == "insert":
            data[at:at] = what
        elif kind == "truncate":
            del data[at:]
        elif kind == "extreme":
            field = what.to_bytes(9, "little")[: 4 if place % 2 else 8]
            data[at : at + len(field)] = field
    return bytes(data)


def read_whole(corpus: Corpus) -> None:
    """Use every part of a corpus, as a loader does."""
    total = corpus.num_tokens
    assert total <= 10**5, "no more tokens than the files could hold"
    fragments = corpus.fragments([(0, total)])
    assert int(fragments.lengths.sum()) == total
    assert len(corpus.tokens(0, total)) == total
    for start in range(0, total, max(1, total // 7)):
        assert start <= corpus.next_document(start) <= total
        corpus.fragments([(start, min(start + 9, total))])
    for index in range(len(corpus.manifest.shards)):
        shard = corpus.shard(index)
        tokens = shard.tokens[0 : shard.num_tokens]
        assert tokens.dtype in (np.uint16, np.uint32)
        for start, stop in ((0, 0), (1, shard.num_tokens), (shard.num_tokens, shard.num_tokens)):
            shard.document_ends(start, stop)


def examples_of(name: str) -> list[Example]:
    return [example for example in FUZZED if example.format == name]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "synthetic"])
def test_a_damaged_file_is_an_error_of_ours_or_reads_like_a_sound_one(name: str) -> None:
    sound = examples_of(name)
    assert sound, "every format has an example in tests/format_examples.py"

    @given(st.data())
    @examples(120, suppress_health_check=list(HealthCheck))
    def damaged(data: st.DataObject) -> None:
        example = data.draw(st.sampled_from(sound))
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "c"
            if example is OWN:
                write_corpus(folder, DOCUMENTS, documents_per_shard=20)
            else:
                shutil.copytree(DATA / example.folder, folder)
            files = sorted(
                path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"
            )
            path = data.draw(st.sampled_from(files))
            content = mutated(path.read_bytes(), data.draw(MUTATIONS))
            if example is OWN:
                forgive(folder / MANIFEST, path.name, len(content))
            path.write_bytes(content)
            tracemalloc.start()
            try:
                read_whole(open_corpus(f"{example.format}:{folder}{example.options}"))
            except PenstockError:
                pass
            finally:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            assert peak < MEMORY

    damaged()


def forgive(manifest: Path, shard: str, size: int) -> None:
    """Let a manifest agree with the size of a damaged shard, so that the reader has to find the damage."""
    text = manifest.read_text()
    before = (manifest.parent / shard).stat().st_size
    lines = text.replace(f'"bytes": {before}', f'"bytes": {size}').split("\n")
    manifest.write_text("\n".join('   "probe": ""' if '"probe"' in line else line for line in lines))
