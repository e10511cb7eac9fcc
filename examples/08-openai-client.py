"""Any program that speaks to OpenAI speaks to a model trained here: only the address is another.

Run it with the folder of a corpus, to train a toy for a moment:  python examples/08-openai-client.py corpus
Your own model: `penstock serve runs/first`, and the client below with its address.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from openai import OpenAI

RECIPE = """
compute = "float32"
run = { dir = "DIR", steps = 5 }
model = { hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4 }
data = { sequence_length = 64, global_batch_size = 8, corpora.docs.path = "CORPUS" }
"""
PENSTOCK = [sys.executable, "-m", "penstock"]


def train(corpus: str, folder: Path) -> Path:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.replace("DIR", str(folder / "toy")).replace("CORPUS", corpus))
    subprocess.run([*PENSTOCK, "train", str(recipe)], check=True, capture_output=True)
    return folder / "toy"


def talk(client: OpenAI) -> None:
    question = [{"role": "user", "content": "def main"}]
    for chunk in client.chat.completions.create(model="toy", messages=question, max_tokens=20, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    # A toy writes nonsense; held to a schema, it writes nonsense that your program can read.
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["size"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "pipe", "schema": schema}}
    reply = client.chat.completions.create(model="toy", messages=question, response_format=wanted)
    print(json.loads(reply.choices[0].message.content)["size"], reply.usage.completion_tokens, "tokens")


def main(corpus: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [*PENSTOCK, "serve", str(train(corpus, Path(folder))), "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            url = json.loads(server.stdout.readline())["url"]  # its first line says where it listens
            try:
                talk(OpenAI(base_url=f"{url}/v1", api_key="unused"))
            finally:
                server.terminate()  # answers in the making would end first


if __name__ == "__main__":
    main(sys.argv[1])
