"""Published measurements of training speed as jobs of the planner; what cannot be one is refused.

A row says what its authors printed. What they left out is assumed here, by rules that look at no result, and
every assumption is said:

- FSDP1's selective recomputation ("every n blocks"): as many as the printed HFU / MFU implies, else 40%
- torchtitan's selective recomputation keeps every second matrix product: a block in three computed again
- torchtitan cuts a pipeline's batch into as many micro-batches as there are ranks (its default)
- FSDP reduces in bfloat16 where its authors' code does (fms-fsdp, llm-foundry), in float32 in torchtitan's
- MPT, GPT and Nemotron have no gate: a gate layer of 2/3 the width has the same parameters and products
- `asyncTP` is torchtitan's, and Transformer Engine's or MegaScale's overlap of tensor-parallel collectives;
  `VPn` n stages of a pipeline's rank (interleaved); `ZeRO-1` gathers and reduces once a step
"""

import csv
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.devices.figures import DEVICES
from penstock.models.decoder.config import DecoderConfig
from penstock.nn.loss_chunks import chunk_tokens
from penstock.parallel.layout import RankLayout
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep

ROWS = Path(__file__).parent / "data" / "perf_reference_points.csv"

_DEVICES = (
    ("Grand Teton", "H100-96GB-500W"),
    ("H100", "H100-80GB"),
    ("H200", "H200"),
    ("B200", "B200"),
    ("A100-40GB", "A100-40GB"),
    ("A100", "A100-80GB"),
)
_OVERLAPS_MESSAGES = ("MegaScale", "NeMo", "Megatron-Bridge")
_UNGATED = ("GPT", "MPT", "Nemotron")
_SHAPES = {
    "GPT-175B": (12288, 32768, 96, 96, 96, 51200, True),
    "minGPT-175B": (12288, 32768, 96, 96, 96, 50000, True),
    "GPT-530B": (20480, 54613, 105, 160, 160, 51200, True),
}


class Refused(Exception):
    """The row is no job of the planner, or leaves out what decides its speed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    id: str
    family: str
    label: str
    job: TrainingStep
    cluster: Cluster
    measured: float
    source: str
    """Where it was published: one paper, or one page of results."""
    metric: str
    """tokens (a device and second), mfu or hfu (shares)."""
    assumed: list[str] = field(default_factory=list)


def read_rows(path: Path = ROWS) -> list[dict[str, str]]:
    """Read a table of measurements."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def case_of(row: dict[str, str]) -> Case:
    """Turn a row into a job and a cluster.

    Raises:
        Refused: it cannot be one.
    """
    assumed: list[str] = []
    measured, metric = _measured(row)
    cluster = _cluster(row, assumed)
    model = _model(row)
    layout, overlapped = _layout(row, cluster)
    length = _number(row["seq_len"]) or _assume(assumed, "8192 tokens a row", 8192)
    micro, parts = _batches(row, layout, length, assumed)
    linear, gather = _precision(row)
    job = TrainingStep(
        model=model,
        layout=layout,
        sequence_length=length,
        micro_batch_size=micro,
        num_micro_batches=parts,
        modes=_modes(row, model, assumed),
        stages_per_rank=int((re.search(r"\bVP ?(\d+)", row["parallelism"]) or [0, 1])[1]),
        keep_mib=math.inf if "ZeRO-1" in row["parallelism"] else 0.0,
        attention=row["attention"] or "flash",
        gather=gather,
        reduce="float32" if "titan" in row["system"] or "nanochat" in row["system"] else "bfloat16",
        linear=linear,
        loss_tokens=chunk_tokens(model.vocab_size),  # of theirs nothing is published
        context_balanced=True,
        stages_balanced=True,
        kernels=_kernels(row),
        messages_overlapped=row["system"].startswith(_OVERLAPS_MESSAGES),
        tensor_overlapped=overlapped,
    )
    return Case(
        id=row["id"],
        family=_family(job),
        label=f"{row['model']} {row['gpu'][:10]} x{cluster.num_devices}",
        job=job,
        cluster=cluster,
        measured=measured,
        metric=metric,
        source=row["source"].split(" ")[0],
        assumed=assumed,
    )


def _assume(assumed: list[str], what: str, value: int) -> int:
    assumed.append(what)
    return value


def _number(text: str) -> int:
    found = re.match(r"\d+", text.strip())
    return int(found[0]) if found else 0


def _measured(row: dict[str, str]) -> tuple[float, str]:
    for column, metric, unit in (
        ("tok_s_gpu", "tokens", 1), ("mfu_pct", "mfu", 0.01), ("hfu_pct", "hfu", 0.01),
    ):  # fmt: skip
        if row[column]:
            return float(row[column]) * unit, metric
    raise Refused("no speed of a device")


def _cluster(row: dict[str, str], assumed: list[str]) -> Cluster:
    names = [name for part, name in _DEVICES if part in row["gpu"]]
    if not names:
        raise Refused(f"no figures of {row['gpu'] or 'the device'}")
    devices = max(map(int, re.findall(r"\d+", row["n_gpus"].split("(")[0])), default=0)
    if not devices or "WAN" in row["internode_bw_gbps_per_node"]:
        raise Refused("its devices or their network are not one cluster")
    per_node = min(_number(row["gpus_per_node"]) or 8, devices)
    speed = _number(row["internode_bw_gbps_per_node"])
    speed = speed or _assume(assumed, "1600 Gbit/s a node", 1600)
    return Cluster(
        nodes=devices // per_node,
        devices_per_node=per_node,
        device=DEVICES[names[0]],
        nics=1,
        nic_gbit_s=speed,
        transport="tcp" if "TCP" in row["internode_bw_gbps_per_node"] else "rdma",
        latency_us=10,
    )


def _model(row: dict[str, str]) -> DecoderConfig:
    if row["model"] in _SHAPES:
        hidden, wide, layers, heads, keys, vocabulary, tied = _SHAPES[row["model"]]
        return _shape(hidden, wide, layers, heads, keys, vocabulary, tied=tied)
    if row["model"].startswith("MPT"):
        hidden = int(row["hidden"])
        heads = hidden // 128
        return _shape(hidden, round(hidden * 8 / 3), int(row["layers"]), heads, heads, 50368, tied=True)
    columns = ("hidden", "ffn", "layers", "heads", "kv_heads", "vocab")
    if not all(row[column] for column in columns):
        raise Refused("its model's shape is not known")
    hidden, wide, *others = (int(row[column]) for column in columns)
    if row["model"].startswith(_UNGATED):
        wide = round(wide * 2 / 3)
    return _shape(hidden, wide, *others, tied=row["model"].startswith("GPT"))


def _shape(
    hidden: int, wide: int, layers: int, heads: int, keys: int, vocabulary: int, *, tied: bool
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
    )


def _layout(row: dict[str, str], cluster: Cluster) -> tuple[RankLayout, bool]:
    said, ranks = row["parallelism"], cluster.num_devices
    if "LoRA" in said or "offload" in said:
        raise Refused("LoRA and offloading are not modelled")
    degree = {axis: int(number) for axis, number in re.findall(r"\b(TP|PP|CP|FSDP) ?(\d+)", said)}
    tensor, pipeline, context = degree.get("TP", 1), degree.get("PP", 1), degree.get("CP", 1)
    rest = ranks // (tensor * pipeline * context)
    async_tensor = bool(re.search(r"async ?TP", said, re.I))
    if said.startswith("HSDP"):
        shard = cluster.devices_per_node
        return RankLayout(replicate=ranks // shard, shard=shard), False
    layout = RankLayout(pipeline=pipeline, shard=rest, context=context, tensor=tensor)
    return layout, async_tensor


def _batches(row: dict[str, str], layout: RankLayout, length: int, assumed: list[str]) -> tuple[int, int]:
    """Return rows of a micro-batch and micro-batches of a step."""
    total = _number(row["global_batch_tokens"])
    rows = total // length // layout.num_data if total else 0
    if layout.pipeline > 1:
        rows = rows or _number(row["micro_batch_per_gpu"])
        if not rows:
            raise Refused("its batch is not known, and its pipeline's bubble follows from it")
        if "titan" in row["system"]:
            return rows // layout.pipeline, layout.pipeline
        micro = _number(row["micro_batch_per_gpu"]) or _assume(assumed, "1 row a micro-batch", 1)
        return micro, rows // micro
    micro = _number(row["micro_batch_per_gpu"])
    if not micro:
        large = layout.tensor > 1 or int(row["hidden"] or 0) > 8000
        micro = _assume(
            assumed, "1 row a micro-batch" if large else "2 rows a micro-batch", 1 if large else 2
        )
    return micro, max(1, math.ceil(rows / micro))


def _precision(row: dict[str, str]) -> tuple[str, str]:
    said = row["precision"].lower()
    linear = "compute"
    if "float8" in said or "fp8" in said:
        linear = "float8_rowwise" if "rowwise" in said else "float8_tensorwise"
    return linear, "float8" if "fp8 all-gather" in said else "compute"


def _kernels(row: dict[str, str]):
    if row["compile"] == "yes":
        return "compiled"
    return "eager" if row["system"].startswith("fms") or "titan" in row["system"] else "fused"


def _modes(row: dict[str, str], model: DecoderConfig, assumed: list[str]):
    said, blocks = row["activation_ckpt"].lower(), model.num_hidden_layers
    share = 0.0
    if said.startswith("full"):
        return "full"
    if re.match(r"none(?!/)", said):  # but not "none/selective/full per size"
        return "keep"
    if "titan" in row["system"]:
        if not said.startswith(("selective", "per-op", "config default")):
            small = int(row["hidden"]) < 8000
            assumed.append("selective recomputation" if small else "full recomputation")
            if not small:
                return "full"
        share = 1 / 3
        full = round(share * blocks)
        return ("full",) * full + ("operators",) * (blocks - full)
    if row["system"].startswith(("Mega", "nano")) or not said:
        return "keep"
    if row["hfu_pct"] and row["mfu_pct"]:
        share = min(1.0, 3 * (float(row["hfu_pct"]) / float(row["mfu_pct"]) - 1))
    elif row["hidden"]:
        hidden = int(row["hidden"])
        share = 0.0 if hidden < 5000 else 0.4 if hidden < 8000 else 1.0
        assumed.append(f"{share:.0%} of the blocks computed again")
    full = round(share * blocks)
    return ("full",) * full + ("keep",) * (blocks - full)


def _family(job: TrainingStep) -> str:
    if job.layout.pipeline > 1:
        return "pipeline"
    if job.layout.tensor > 1:
        return "tensor parallel"
    if job.layout.context > 1 or job.sequence_length > 16384:
        return "long rows"
    if job.linear != "compute":
        return "float8"
    return "dense"
