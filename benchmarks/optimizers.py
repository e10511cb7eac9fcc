"""What does a step of each optimizer cost, and what does it keep, against torch's fused AdamW?

    python benchmarks/optimizers.py --out benchmarks/results

A Llama of `--hidden` width on one process, random gradients, settings in turn. A figure is the CPU time of a
step as a multiple of torch.optim.AdamW(fused=True) on float32 weights; bytes are of weights and states for
each parameter. Muon's work for a parameter grows with the width of its matrix, and is in bfloat16, which a
CPU without instructions for it emulates.
"""

import argparse
from pathlib import Path

import torch
from measuring import interleaved, median
from results_file import file_result

from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.optim.weight_storage import STORAGES
from penstock.train.recipe.optim_config import OptimConfig

SETTINGS = {
    "adamw, float32": ("adamw", "float32"),
    "adamw, bfloat16 with a float32 copy": ("adamw", "bfloat16_master"),
    "adamw, bfloat16 rounded at random": ("adamw", "bfloat16_stochastic"),
    "adamw_8bit, float32": ("adamw_8bit", "float32"),
    "adamw_8bit, bfloat16 rounded at random": ("adamw_8bit", "bfloat16_stochastic"),
    "muon, float32": ("muon", "float32"),
}
REFERENCE = "torch.optim.AdamW(fused=True)"


def model_of(hidden, layers, dtype):
    """Return a model with a gradient for every parameter."""
    shape = DecoderConfig(
        vocab_size=8 * hidden,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
    )
    model = Decoder(shape).to(dtype)
    init_weights(model, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def prepared(hidden, layers):
    """Return name -> (model, optimizer)."""
    found = {}
    reference = model_of(hidden, layers, torch.float32)
    found[REFERENCE] = reference, torch.optim.AdamW(reference.parameters(), fused=True)
    for name, (rule, weights) in SETTINGS.items():
        model = model_of(hidden, layers, STORAGES[weights].dtype)
        found[name] = model, build_optimizer(model, OptimConfig(rule=rule), weights=weights)
    return found


def bytes_per_parameter(model, optimizer):
    """Return the bytes of weights and states for each parameter."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = [*model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
    return sum(t.numel() * t.element_size() for t in kept) / sum(p.numel() for p in model.parameters())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ready = prepared(arguments.hidden, arguments.layers)
    num_parameters = sum(p.numel() for p in ready[REFERENCE][0].parameters())

    def step(optimizer):
        optimizer.step()
        return num_parameters

    measured = interleaved(
        {name: lambda optimizer=optimizer: step(optimizer) for name, (_, optimizer) in ready.items()},
        rounds=arguments.rounds,
    )
    base = measured[REFERENCE]["per_cpu_s"]
    figures = {}
    for name, (model, optimizer) in ready.items():
        ratios = [one / mine for one, mine in zip(base, measured[name]["per_cpu_s"], strict=True)]
        figures[name] = {
            "cpu_time_of_reference": median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "bytes_per_parameter": bytes_per_parameter(model, optimizer),
        }
        kept = figures[name]["bytes_per_parameter"]
        print(f"{name:40} {median(ratios):6.2f} x   {kept:5.2f} bytes a parameter")
    if arguments.out:
        result = {
            "parameters": num_parameters,
            "hidden": arguments.hidden,
            "threads": 1,
            "rounds": arguments.rounds,
            "figures": figures,
        }
        file_result(arguments.out, "optimizers", result, packages=("torch",))


if __name__ == "__main__":
    main()
