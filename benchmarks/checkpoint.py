"""How long does training stand still for a checkpoint, and how fast is it written?

    python benchmarks/checkpoint.py --out benchmarks/results

Ranks of one machine hold float32 state, sharded over all or as copies on all, and go on with matrix products
while it is written. Three writers take turns: Penstock's, torch.distributed.checkpoint's `async_save` (as its
tutorial shows it: a gloo group, a thread), and its `save`, which stands still until all is written.

    blocked    seconds until training may go on: the longest of the ranks
    written    seconds until the checkpoint is complete on disk: the longest of the ranks
    bytes      of the files, over the bytes of the state once
    products   per second while a checkpoint is written, over the rate beside no checkpoint
"""

import argparse
import shutil
import statistics
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from results_file import file_result
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from penstock.checkpoint.layout import Meta
from penstock.checkpoint.saver import RetentionPolicy, Saver
from penstock.checkpoint.storage import place_in
from penstock.core import clock
from penstock.models.decoder.config import DecoderConfig
from penstock.testing.ranks import on_ranks

COLUMNS = 1024
MODEL = DecoderConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    max_position_embeddings=8,
)


def state_of(world, layout, num_bytes):
    """Return tensors of 16 MiB, in a layout over all ranks."""
    placement = {"sharded": Shard(0), "copies": Replicate()}[layout]
    rows = 2**24 // 4 // COLUMNS
    made = [torch.rand(rows, COLUMNS) for _ in range(max(1, num_bytes // 2**24))]
    mesh = init_device_mesh("cpu", (world.ranks.world_size,))
    return {f"t{n}": distribute_tensor(value, mesh, [placement]) for n, value in enumerate(made)}


def products_until(done):
    """Multiply matrices until `done()`; return how many a second, at least one."""
    a, count, began = torch.rand(192, 192), 0, clock.monotonic()
    while not count or not done():
        a = (a @ a).clamp_(0, 1)
        count += 1
    return count / (clock.monotonic() - began)


def penstock(_, state):
    """Save with Penstock; return seconds blocked, and products a second while it was written."""
    meta = Meta(step=1, tokens=0, model=MODEL, loader={}, seed=0, world_size=dist.get_world_size())
    began = clock.monotonic()
    SAVER[0].save(state, meta)
    blocked = clock.monotonic() - began
    rate = products_until(SAVER[0].is_idle)
    SAVER[0].finish()
    return blocked, rate


def torch_async(folder, state):
    began = clock.monotonic()
    future = dcp.async_save(state, checkpoint_id=str(folder), process_group=GROUP[0])
    blocked = clock.monotonic() - began
    rate = products_until(future.done)
    future.result()
    return blocked, rate


def torch_sync(folder, state):
    began = clock.monotonic()
    dcp.save(state, checkpoint_id=str(folder), process_group=GROUP[0])
    return clock.monotonic() - began, None


WRITERS = {"penstock": penstock, "torch async_save": torch_async, "torch save": torch_sync}
SAVER, GROUP = [], []


def rounds_of(world, folder, layout, num_bytes, rounds):
    """Return rounds of writer -> [blocked s, written s, share of products kept, bytes]."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # torch's, of its own internals
    GROUP[:] = [dist.new_group(backend="gloo")]
    state = state_of(world, layout, num_bytes)
    found = []
    with Saver(place_in(folder / "penstock", ""), RetentionPolicy()) as saver:
        SAVER[:] = [saver]
        for number in range(-1, rounds):
            one = {}
            for name, save in WRITERS.items():
                place = folder / name
                until = clock.monotonic() + 0.5
                alone = products_until(lambda until=until: clock.monotonic() > until)
                dist.barrier()
                began = clock.monotonic()
                blocked, rate = save(place, state)
                written = clock.monotonic() - began
                dist.barrier()
                size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
                one[name] = [blocked, written, None if rate is None else rate / alone, size]
                dist.barrier()
                if world.is_first:
                    shutil.rmtree(place)
                dist.barrier()
            if number >= 0:
                found.append(one)
    return found


def measure(layout, *, num_bytes, ranks, rounds):
    """Return writer -> medians over the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = on_ranks(
            lambda world: rounds_of(world, Path(folder), layout, num_bytes, rounds), ranks=ranks
        )
    medians = {}
    state_bytes = max(1, num_bytes // 2**24) * 2**24
    for name in WRITERS:
        each = [[rank[number][name] for rank in by_rank] for number in range(rounds)]
        blocked = statistics.median(max(one[0] for one in ranks) for ranks in each)
        written = statistics.median(max(one[1] for one in ranks) for ranks in each)
        kept = [statistics.mean(one[2] for one in ranks) for ranks in each if ranks[0][2] is not None]
        medians[name] = {
            "blocked_s": blocked,
            "written_s": written,
            "blocked_share": blocked / written,
            "mb_per_s": state_bytes / written / 1e6,
            "bytes_over_state": each[0][0][3] / state_bytes,
            "products_kept": statistics.median(kept) if kept else None,
        }
        print(f"{layout:<8} {name:<17}", " ".join(f"{k}={v:.3g}" for k, v in medians[name].items() if v))
    return medians


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="of the state, in all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON")
    arguments = parser.parse_args()
    size = {"num_bytes": arguments.mib * 2**20, "ranks": arguments.ranks, "rounds": arguments.rounds}
    found = {layout: measure(layout, **size) for layout in ("sharded", "copies")}
    if arguments.out:
        file_result(arguments.out, "checkpoint", {**size, "layouts": found}, packages=("torch",))


if __name__ == "__main__":
    main()
