"""The OpenAPI document as a page."""

from fastapi import FastAPI
from pydantic import BaseModel

from penstock.serve.routes.info import api_page


class Inner(BaseModel):
    size: int


class Sent(BaseModel):
    name: str
    parts: list[Inner] | None = None
    either: str | list[int] = "<b>"


def page_of(schema):
    app = FastAPI(title="A <title>", version="1")

    @app.post("/parts", description="Take <i>parts</i>.")
    def take(body: schema) -> None: ...

    @app.get("/state")
    def state() -> None: ...

    return api_page(app.openapi())


def test_a_page_has_every_route_and_key_and_runs_nothing():
    page = page_of(Sent)
    for words in (
        "POST /parts",
        "GET /state",
        "<code>name</code> (required)",
        "list of Inner",
        "string or list of integer",
    ):
        assert words in page
    assert "<code>size</code>" in page
    assert "No request body." in page
    assert "<script" not in page


def test_what_the_document_says_is_text():
    page = page_of(Sent)
    assert "A &lt;title&gt; 1" in page
    assert "Take &lt;i&gt;parts&lt;/i&gt;." in page
    assert "<i>" not in page


class Tree(BaseModel):
    """Holds itself."""

    branches: "list[Tree]" = []


def test_an_object_that_holds_itself_has_an_end():
    assert page_of(Tree).count("<code>branches</code>") == 3
