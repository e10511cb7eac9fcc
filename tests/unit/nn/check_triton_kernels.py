"""Every launch of an 8B model, compiled for both generations of GPUs: `make soak PART=operators`."""

from tests.unit.nn.test_triton_kernels import pytestmark, run

__all__ = ["pytestmark"]


def test_every_launch_of_an_8b_model_compiles_for_two_generations_of_gpus(tmp_path):
    shared = [int(line) for line in run("compile all", tmp_path).split()]
    assert len(shared) == 2 * 25
    assert max(shared) < 99 * 2**10  # bytes that a program may have on every GPU since the A100
