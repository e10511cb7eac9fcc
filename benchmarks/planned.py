"""What the planner says of the hosts that benchmarks/ethernet.py emulates: step times, the best plan."""

from dataclasses import replace

from ethernet_cases import HOSTS

from penstock.devices.figures import DEVICES
from penstock.parallel.layout import RankLayout, layout_of, on_machines
from penstock.plan.candidates import Question
from penstock.plan.hardware import Cluster
from penstock.plan.job import TrainingStep
from penstock.plan.predict import predict
from penstock.plan.recipe_sections import sections_of
from penstock.plan.search import search

_ENDLESS_GB_S = 1e6
_ROUNDS = 2


def cluster_of(job, *, nodes, nics, gbit_s, compute_s):
    """Return a cluster whose devices compute a step of a job in so many seconds, and do nothing else."""
    device = replace(DEVICES["CPU"], memory_gb_s=_ENDLESS_GB_S, launch_us=0.0)
    devices_per_node = job.layout.world_size // nodes
    cluster = Cluster(
        nodes=nodes,
        devices_per_node=devices_per_node,
        device=device,
        nics=nics,
        nic_gbit_s=gbit_s,
        straggling=0.0,  # one machine plays all hosts
    )
    for _ in range(_ROUNDS):  # time is inverse to speed, but for what the first guess could not see
        ratio = predict(job, cluster).compute_s / compute_s
        device = replace(cluster.device, float32_tflops=cluster.device.float32_tflops * ratio)
        cluster = replace(cluster, device=device)
    return cluster


def job_of(recipe, *, world_size):
    """Return a recipe as the planner sees it."""
    ethernet, data = recipe.ethernet, recipe.data
    parallel = on_machines(recipe.parallel, world_size=world_size, ranks_per_machine=world_size // HOSTS)
    layout = layout_of(parallel, world_size=world_size)
    return TrainingStep(
        model=recipe.model,
        layout=layout,
        sequence_length=data.sequence_length,
        micro_batch_size=data.micro_batch_size,
        num_micro_batches=data.global_batch_size // layout.num_data // data.micro_batch_size,
        compute="float32",
        kernels="eager",
        overlapped=ethernet.overlap,
        window_mib=ethernet.window_mib,
        keep_mib=ethernet.keep_mib,
        schedule=ethernet.schedule,
        turning=ethernet.overlap,
        on_cpu=True,
        gather=ethernet.gather,
        reduce=ethernet.reduce,
        feedback=ethernet.feedback,
        operations=ethernet.operations,
    )


def planned(recipe, cluster):
    """Return the sections of a recipe that the planner would write, micro-batches left as they are."""
    step = TrainingStep(
        model=recipe.model,
        layout=RankLayout(),
        sequence_length=recipe.data.sequence_length,
        compute="float32",
        kernels="eager",
    )
    question = Question(
        step=step,
        global_batch_size=recipe.data.global_batch_size,
        decided={"micro_batch_size": recipe.data.micro_batch_size, "modes": "keep", "gather": "compute"},
    )
    sections = sections_of(search(question, cluster).best.job)
    return {name: sections[name] for name in ("parallel", "ethernet") if name in sections}
