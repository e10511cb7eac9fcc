"""Answer a list of prompts at once, and stream several answers side by side from asyncio.

    python examples/07-many-prompts-at-once.py CORPUS

In place of a trained model this writes one of random weights with the corpus's tokenizer; give `LLM` a run, a
checkpoint or a Hugging Face folder of your own.
"""

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from penstock import LLM, EngineConfig, Params, Sampling
from penstock.checkpoint.hf import save_pretrained
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.text.tokenizer import Tokenizer


def random_model(folder: Path, corpus: Path) -> Path:
    vocab_size = Tokenizer.load(corpus / "tokenizer.json").vocab_size
    config = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = Decoder(config)
    init_weights(model, seed=0)
    save_pretrained(model.state_dict(), config, folder)
    shutil.copy(corpus / "tokenizer.json", folder)
    return folder


async def one_answer(llm: LLM, prompt: str, params: Params) -> str:
    """Streams of one model share its steps: none waits for another to end."""
    return "".join([piece.text async for piece in llm.stream_async(prompt, params)])


async def several(llm: LLM, params: Params) -> list[str]:
    return await asyncio.gather(*(one_answer(llm, f"Chapter {n}", params) for n in range(1, 4)))


def main(corpus: Path) -> None:
    params = Params(sampling=Sampling(temperature=0.7, seed=1), max_tokens=24)
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch) / "model", corpus)
        with LLM(folder, EngineConfig(max_sequences=16)) as llm:
            prompts = [f"Question {n}:" for n in range(32)]  # 16 run at once, the others wait their turn
            for answers in llm.generate(prompts, params)[:3]:
                print(len(answers.prompt), "tokens ->", repr(answers.text))
            assert asyncio.run(several(llm, params))[0] == llm.generate("Chapter 1", params)[0].text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
