"""Other ways for a plan to use the network: wider windows of gathers, fewer bits; pure.

They are tried where a plan waits for the network, not with every plan: they change neither what fits where
nor which layouts are worth a look.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from penstock.plan.candidates import Question
from penstock.plan.job import Job

_MIB = 2**20
_WINDOWS = (4, 8)
"""Blocks under way at once; two are what a plan begins with."""


def wider(job: Job, decided: Mapping[str, Any]) -> Iterator[Job]:
    """Yield a job with more of its gathers under way at once, if that is open."""
    if not job.overlapped or job.shard_ranks == 1 or "window_mib" in decided:
        return
    block = job.block_parameters * job.compute_bytes / job.layout.tensor
    for blocks in _WINDOWS:
        yield replace(job, window_mib=float(-(-blocks * block // _MIB)))


def coded(job: Job, question: Question) -> Iterator[Job]:
    """Yield a job whose weights, gradients or both travel in int8, as far as that is allowed and open."""
    if not question.may_compress or not job.overlapped:
        return
    whole = isinstance(job.reshard_after_forward, bool)
    can_gather = job.shard_ranks > 1 and whole and "gather" not in question.decided
    can_reduce = "reduce" not in question.decided
    if can_gather:
        yield replace(job, gather="int8")
    if can_reduce:
        yield replace(job, reduce="int8")
    if can_gather and can_reduce:
        yield replace(job, gather="int8", reduce="int8")
