"""Adapters behind the server: each is a model by its name."""

import openai
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.serving import make_model, serving

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def test_a_request_names_an_adapter_as_its_model(tmp_path):
    folder = make_model(tmp_path / "tiny")
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "legal")
    words = ("--adapter", f"legal={tmp_path / 'legal'}", "--cache-gib", "0.05")
    with serving(folder, *words) as server, server.openai() as client:
        assert [(model.id, model.root) for model in client.models.list()] == [
            ("tiny", "tiny"),
            ("legal", "tiny"),
        ]
        prompt = "the penstock feeds the turbine; " * 4  # long enough to be found computed
        texts = {
            name: client.completions.create(model=name, prompt=prompt, max_tokens=8, temperature=0)
            for name in ("tiny", "legal", "tiny", "legal")
        }
        assert texts["tiny"].choices[0].text != texts["legal"].choices[0].text
        assert texts["legal"].model == "legal"
        with pytest.raises(openai.NotFoundError, match="there is tiny, legal"):
            client.completions.create(model="other", prompt="a")
        vectors = [
            client.embeddings.create(model=name, input="a").data[0].embedding for name in ("tiny", "legal")
        ]
        assert vectors[0] != vectors[1]
