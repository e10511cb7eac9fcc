"""The state of the application: what the model and its adapters share."""

import json

import pytest
import tokenizers

from penstock.engine.llm import LLM
from penstock.engine.text_processor import TextProcessor
from penstock.serve.app import build_service
from penstock.serve.limits import ServerLimits
from penstock.serve.state import API_SAMPLING
from penstock.text.tokenizer import train_tokenizer
from tests.hashing_engine import hashing_engine

BASE = train_tokenizer(["the penstock feeds the turbine"] * 9, vocab_size=280)


@pytest.fixture
def text(tmp_path):
    model = TextProcessor(tokenizer=BASE)
    grown = tokenizers.Tokenizer.from_str(BASE.content.decode())
    grown.add_special_tokens(["<call>"])
    for name in ("plain", "legal", "medical", "padded"):
        (tmp_path / name).mkdir()
        if name != "plain":
            (tmp_path / name / "chat_template.jinja").write_text("<call>{{ messages[0].content }}")
            (tmp_path / name / "tokenizer.json").write_text(grown.to_str(pretty=name == "legal"))
    (tmp_path / "padded" / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<call>"}))
    for name in ("plain", "legal", "medical", "padded"):
        model.add_adapter(name, tmp_path / name)
    return model


def test_adapters_alike_share_a_process_of_their_template_and_the_names_of_their_tokens(text):
    engine = hashing_engine()
    engine.text_processor = text
    with LLM.of(engine) as llm:
        service = build_service(
            llm,
            name="m",
            adapters=text.adapters,
            limits=ServerLimits(),
            created=0,
            sampling=API_SAMPLING,
            splits_reasoning=False,
        )
    served = service.served
    plain, legal, medical, padded = served.adapters.values()
    assert (legal.name, legal.adapter, served.adapter) == ("legal", "legal", None)
    assert plain.templates is served.templates
    assert legal.templates is medical.templates is not served.templates
    assert padded.templates not in (legal.templates, served.templates)  # the template may name the token
    assert plain.names is served.names
    assert legal.names is medical.names is padded.names is not served.names
