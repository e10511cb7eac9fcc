"""How a corpus is named: folders, addresses, FORMAT:PATH with options, and what is refused."""

from pathlib import Path

import pytest

from penstock.core.errors import UsageError
from penstock.data.corpus.spec import Spec, parse_spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("corpora/web", Spec(None, "corpora/web", {})),
        ("s3://bucket/web", Spec(None, "s3://bucket/web", {})),
        ("megatron:/data/web/part", Spec("megatron", "/data/web/part", {})),
        ("megatron:s3://bucket/web", Spec("megatron", "s3://bucket/web", {})),
        ("olmo:/d,dtype=uint32,eos_id=2", Spec("olmo", "/d", {"dtype": "uint32", "eos_id": "2"})),
        ("olmo:/d,eos_id=2,dtype=uint32", Spec("olmo", "/d", {"dtype": "uint32", "eos_id": "2"})),
        ("olmo:/a,b/c,dtype=uint32", Spec("olmo", "/a,b/c", {"dtype": "uint32"})),
        ("olmo:/date=1,x=2/c,dtype=uint32", Spec("olmo", "/date=1,x=2/c", {"dtype": "uint32"})),
        ("synthetic:tokens=1e14,seed=1", Spec("synthetic", "", {"tokens": "1e14", "seed": "1"})),
        ("datatrove:/d,vocab_size=300", Spec("datatrove", "/d", {"vocab_size": "300"})),
    ],
)
def test_a_spec_is_taken_apart(text: str, expected: Spec) -> None:
    assert parse_spec(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("megatrn:/d", r"unknown format \(got 'megatrn'\)\. Did you mean 'megatron'\? Write FORMAT:PATH"),
        ("olmo:/d,dtyp=uint32", r"Format olmo has no such option \(got 'dtyp'\)\. Did you mean 'dtype'\?"),
        ("olmo:/d,eos_id=1,eos_id=2", r"Option eos_id of a corpus is given twice"),
        ("synthetic:tokens", r"written option=value \(got 'tokens'\)"),
        ("synthetic:token=5", r"no such option \(got 'token'\)\. Did you mean 'tokens'\?"),
        ("arrow:/d,eos_id=1", r"Format arrow has no such option \(got 'eos_id'\)\. It has none"),
        ("megatron:", "A corpus has no path"),
    ],
)
def test_a_spec_that_is_wrong_says_how(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_spec(text)


def test_a_path_that_exists_is_that_path_whatever_it_looks_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("olmo:x,dtype=1", "a,eos_id=2"):
        Path(name).mkdir()
    assert parse_spec("olmo:x,dtype=1") == Spec(None, "olmo:x,dtype=1", {})
    assert parse_spec("olmo:a,eos_id=2") == Spec("olmo", "a,eos_id=2", {})
