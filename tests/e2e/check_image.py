"""The image as OpenShift would start it: what the Containerfile's steps make in a fresh Debian.

Minutes and a gigabyte from Debian's and pip's mirrors, as root, where debootstrap is: `make soak PART=image`.
"""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.containerfile import build, why_not

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text()
ANY_USER = "1000670000:0"
RECIPE = """compute = "float32"
run = { dir = "run", steps = 2 }
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
[data]
sequence_length = 64
global_batch_size = 4
corpora = { c = { path = "synthetic:tokens=1e8,vocab_size=300" } }
"""
LIBRARIES = """
from penstock.data import native as loops
from penstock.nn import native as operators
from penstock.nn.native import built_library
assert operators.is_available() and loops.library() is not None
print(built_library(), loops.built_library())
"""


@pytest.fixture(scope="module")
def image():
    if refused := why_not():
        pytest.skip(refused)
    folder = Path(tempfile.mkdtemp(prefix="penstock-image-"))
    try:
        yield build(TEXT, ROOT, folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.timeout(3600)
def test_the_image_starts_as_any_user_on_a_read_only_root(image):
    def run(*words):
        return image.run(*words, user=ANY_USER, read_only=True)

    shown = run(*image.entrypoint, *image.command)
    assert (shown.returncode, "usage: penstock" in shown.stdout) == (0, True), shown.stderr
    for tool in ("g++", "cc", "pip", "make"):
        assert run("which", tool).returncode, tool
    owner = run("id", "-u")
    assert owner.stdout == "1000670000\n"
    assert run("touch", "/opt/penstock/lib/penstock/x").returncode, "the libraries are root's alone"

    loaded = run("python", "-c", LIBRARIES)
    assert loaded.returncode == 0, loaded.stderr
    assert all(path.startswith("/opt/penstock/lib/penstock/") for path in loaded.stdout.split())

    examined = run("penstock", "doctor", "--seconds", "2")
    assert "Traceback" not in examined.stderr, examined.stderr
    assert examined.returncode in (0, 1), examined.stderr

    trained = run(
        "sh", "-c", f"cat > recipe.toml <<'END'\n{RECIPE}END\npenstock train recipe.toml --processes 2"
    )
    assert trained.returncode == 0, trained.stderr
    assert "Finished: 2 steps are done" in trained.stderr
    assert "are not used" not in trained.stderr
