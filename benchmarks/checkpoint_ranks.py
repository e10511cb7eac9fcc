"""What does the exchange before a save cost on many ranks, and what does a save cost without it? Simulated.

    python benchmarks/checkpoint_ranks.py --ranks 1000 --out benchmarks/results

One process does what each rank does on its training thread at a save, but for the copy of its bytes: it names
the boxes it holds, and where the layout is new, it reads the lists of all ranks and shares the boxes out. The
lists are those of a 70B model and its moments, sharded over all ranks. What processes do is measured here;
what the network adds is computed: a ring's all-gather in `ranks - 1` turns, each with a latency.

    first       the first save of a layout: seconds of work, and of the network
    later       each later one
    before      what each save cost while lists were exchanged every time: as `first`
    index       work of rank 0's background thread to put the index together; training does not wait for it
"""

import argparse
import pickle
import statistics
from pathlib import Path

from results_file import file_result

from penstock.checkpoint.layout import FileEntry, Meta, TensorEntry, encode
from penstock.checkpoint.saver import Written, index_of
from penstock.checkpoint.write_plan import Held, holders, share_of
from penstock.core import clock
from penstock.core.boxes import Box
from penstock.models.decoder.config import DecoderConfig

LATENCY_S, BYTES_PER_S = 50e-6, 1.25e9  # of one turn on 10 Gbit/s Ethernet
HIDDEN, INNER, BLOCKS, VOCAB, KEYS = 8192, 28672, 80, 128256, 1024
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
MODEL = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=BLOCKS,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)


def shapes_of():
    """Return every tensor of the training state: weights, two moments and a count of steps each."""
    weights = {
        f"layers.{block}.{name}.weight": shape for block in range(BLOCKS) for name, shape in SHAPES.items()
    }
    weights |= {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    states = {
        f"optimizer.{name}.{key}": shape
        for name, shape in weights.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    steps = {f"optimizer.{name}.step": () for name in weights}
    return {**{f"model.{name}": shape for name, shape in weights.items()}, **states, **steps}


def held_by(rank, ranks, shapes):
    """Return what a rank holds: its rows of each tensor, as FSDP cuts them."""
    found = []
    for name, shape in shapes.items():
        if not shape:
            found.append(Held(name, Box((), ()), 4))
            continue
        rows = -(-shape[0] // ranks)
        first = min(rank * rows, shape[0])
        sizes = (min(rows, shape[0] - first), *shape[1:])
        found.append(Held(name, Box((first, *[0] * (len(shape) - 1)), sizes), 4))
    return found


def median_s(work, *, times):
    """Return the median time of some calls, and what the last returned."""
    taken, found = [], None
    for _ in range(times):
        began = clock.monotonic()
        found = work()
        taken.append(clock.monotonic() - began)
    return statistics.median(taken), found


def gather_s(num_bytes, ranks):
    """Return what a ring's all-gather takes on the network: of sizes first, then of so many bytes a rank."""
    turns = ranks - 1
    return 2 * turns * LATENCY_S + turns * (num_bytes + 8) / BYTES_PER_S


def measure(ranks, times):
    """Return the figures of one number of ranks."""
    shapes, rank = shapes_of(), ranks // 2
    name_s, ours = median_s(lambda: held_by(rank, ranks, shapes), times=times)
    key_s, mine = median_s(lambda: [each.key for each in ours], times=times)
    lists = [mine if r == rank else [each.key for each in held_by(r, ranks, shapes)] for r in range(ranks)]
    sent = [pickle.dumps(each) for each in lists]
    read_s, told = median_s(lambda: [pickle.loads(each) for each in sent], times=times)
    share_s, share = median_s(
        lambda: share_of(rank, dict(zip(ours, holders(mine, told), strict=True))), times=times
    )
    same_s, _ = median_s(lambda: held_by(rank, ranks, shapes) == ours, times=times)
    entries = {name: TensorEntry(dtype="F32", shape=shape) for name, shape in shapes.items()}
    total = sum(4 * _size(shape) for shape in shapes.values())
    written = [
        Written(
            f"rank-{r:05d}.safetensors",
            FileEntry(num_bytes=(total if r == 0 else 0) + 8, header_bytes=8, header_crc32=0),
            entries if r == 0 else {},
        )
        for r in range(ranks)
    ]
    meta = Meta(step=1, tokens=1, model=MODEL, loader={}, seed=0, world_size=ranks)
    index_s, _ = median_s(lambda: encode(index_of(meta, written)), times=times)
    network_s, megabytes = gather_s(len(sent[rank]), ranks), ranks * len(sent[rank]) / 1e6
    return {
        "ranks": ranks,
        "tensors": len(shapes),
        "parts_of_a_rank": len(share),
        "first_work_s": name_s + key_s + read_s + share_s,
        "first_network_s": network_s,
        "first_received_mb": megabytes,
        "later_work_s": same_s,
        "later_network_s": 0.0,
        "thread_index_s": index_s,
    }


def _size(shape):
    size = 1
    for each in shape:
        size *= each
    return size


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 100, 1000])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    rows = [measure(ranks, arguments.times) for ranks in arguments.ranks]
    for row in rows:
        print(f"{row['ranks']} ranks, {row['tensors']:,} tensors, index {row['thread_index_s']:.3f} s")
        received = f"{row['first_received_mb']:.1f} MB received"
        for save, added in (("first", f", {received}"), ("later", "")):
            work, network = row[f"{save}_work_s"], row[f"{save}_network_s"]
            print(f"  {save} save: {work:.3f} s of work, {network:.3f} s of network{added}")
    if arguments.out:
        file_result(arguments.out, "checkpoint_ranks", {"latency_s": LATENCY_S, "rows": rows})


if __name__ == "__main__":
    main()
