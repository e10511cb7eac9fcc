"""Addresses of remote corpora: what is taken, what is refused, and that no secret is quoted."""

import pytest

from penstock.core.errors import ConfigError, CorpusError
from penstock.storage.address import check_name, is_remote, parse


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://bucket/web", "gs://bucket/web"),
        ("az://container/web", "az://container/web"),
        ("https://example.org:8443/web", "https://example.org:8443/web"),
        ("http://127.0.0.1:80/web", "http://127.0.0.1:80/web"),
        ("http://[::1]:80/web", "http://[::1]:80/web"),
        ("http://localhost/web", "http://localhost/web"),
    ],
)
def test_an_address_is_understood(text: str, url: str) -> None:
    assert is_remote(text)
    assert parse(text).url == url


def test_the_address_of_an_object_is_escaped() -> None:
    assert (
        parse("https://example.org/web").url_of("a b/ü.arrow") == "https://example.org/web/a%20b/%C3%BC.arrow"
    )


def test_only_object_stores_have_a_listing() -> None:
    assert [parse(f"{scheme}://localhost/x").has_listing for scheme in ("s3", "gs", "az", "https")] == [
        True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/web", "unknown scheme .got 'ftp'"),
        ("S3:/bucket", "unknown scheme"),
        ("s3:///web", "names no bucket or host"),
        ("http://192.0.2.1/web", "Plain http to another machine .* Use https"),
        ("http://localhost.example.org/web", "Plain http"),
        ("http://127.0.0.1.example.org/web", "Plain http"),
    ],
)
def test_another_address_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_plain_http_is_taken_where_it_is_allowed() -> None:
    assert parse("http://192.0.2.1/web", allow_plain_http=True).place == "192.0.2.1"


@pytest.mark.parametrize(
    "text",
    [
        "https://me:secret@example.org/web",
        "https://secret@example.org/web",
        "s3://bucket/web?X-Amz-Signature=secret",
        "https://example.org/web#secret",
    ],
)
def test_an_address_with_a_secret_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(ConfigError, match="Set credentials in your") as caught:
        parse(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "../x", "a/../x", "/x", "a//x", "./x", "a/.", "a\\x"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(CorpusError, match="must be a path below its corpus"):
        check_name(name)


def test_a_name_below_the_corpus_is_taken() -> None:
    assert check_name("a/b..c/.d") == "a/b..c/.d"
