"""On a machine with torch, numpy and jaxtyping alone, corpora are read, models train and generate."""

import subprocess
import sys
from pathlib import Path

import pytest

MEGATRON = Path(__file__).parents[1] / "data" / "megatron" / "uint16"

BARE = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    absent = {
        "fastapi", "llguidance", "obstore", "prometheus_client", "pyarrow", "pydantic", "rich",
        "safetensors", "starlette", "tensorboard", "tokenizers", "torchao", "transformers", "triton",
        "uvicorn", "uvloop", "xxhash",
    }

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, Refuse())
"""


def on_a_bare_machine(code, *arguments):
    """Run a program where those packages cannot be imported; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", BARE + code, *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


READ = """
from penstock.data.loader import Loader
loader = Loader({"it": sys.argv[1]}, sequence_length=32, global_batch_size=2, deliver="numpy")
print(int(sum(next(iter(loader))["input_ids"].sum() for _ in range(3))))
"""


@pytest.mark.parametrize(
    "corpus",
    ["synthetic:tokens=20k,vocab_size=500,seed=7", f"megatron:{MEGATRON}", f"{MEGATRON}"],
    ids=["synthetic", "megatron", "a folder whose format is found"],
)
def test_a_corpus_is_read_as_where_everything_is_installed(corpus, monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    everywhere = subprocess.run(
        [sys.executable, "-c", "import sys\n" + READ, corpus], capture_output=True, text=True, check=True
    )
    assert on_a_bare_machine(READ, corpus) == everywhere.stdout != "0\n"


def test_a_model_trains_from_the_command_line_and_generates_from_its_run(tmp_path):
    (tmp_path / "recipe.toml").write_text(f"""
        compute = "float32"
        [run]
        dir = "{tmp_path}/run"
        steps = 2
        [model]
        hidden_size = 32
        intermediate_size = 64
        num_hidden_layers = 2
        num_attention_heads = 2
        vocab_size = 128
        [data]
        corpora.a.path = "synthetic:tokens=50k,vocab_size=128"
        sequence_length = 16
        global_batch_size = 4
        [checkpoint]
        every = 2
    """)
    code = """
from pathlib import Path
import penstock.engine.llm
from penstock.cli.main import main
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request

folder = Path(sys.argv[1])
assert main(["train", str(folder / "recipe.toml")]) == 0
engine = build_engine(folder / "run", EngineConfig(max_context=16, cache_gib=0.01, device="cpu"))
engine.add(Request(prompt=(3, 1, 4, 1, 5), max_tokens=7))
tokens = []
while engine.has_work:
    for piece in engine.step():
        tokens += piece.token_ids
print("tokens", len(tokens))
"""
    assert "tokens 7" in on_a_bare_machine(code, tmp_path)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "from penstock.data import open_corpus; open_corpus('parquet:' + sys.argv[1])",
            "Arrow and Parquet files need the package pyarrow, which is not installed. pip install pyarrow",
        ),
        (
            "from penstock.text.tokenizer import Tokenizer; Tokenizer(b'{}')",
            "Tokenizers need the package tokenizers, which is not installed. pip install tokenizers",
        ),
        (
            "from penstock.cli.main import main; main(['data', 'prepare', sys.argv[1], '--out', 'x'])",
            "need the package",
        ),
    ],
    ids=["parquet", "tokenizer", "command"],
)
def test_a_feature_names_the_package_that_it_lacks(code, told, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 8)
    done = subprocess.run(
        [sys.executable, "-c", BARE + code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert told in done.stderr
