"""Step timeline: a simulation of in-order streams that share links. Pure functions.

A rank has three streams, as in FSDP2: `compute`, `gather` and `reduce`. Each runs its operations in order;
one starts when its stream is free, its inputs are ready, and its link is free. Blocks are visited in order,
forward and then back, micro-batch after micro-batch. The gather of a visit may run ahead of it by less than
the window: its memory is that of the block computed `window` visits before. A block's gradients are reduced
after its backward, at most two reductions at a time.

Micro-batches repeat: the first, one in the middle and the last are simulated, the others equal the middle
one, so a step of many micro-batches costs no more than one of three.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.plan.comm import FREE, Cost, Link

Stream = Literal["compute", "gather", "reduce"]

_REDUCTIONS = 2
_SIMULATED = 3


class Transfers(NamedTuple):
    """Collectives over a unit's parameters."""

    gather: Cost = FREE
    again: Cost = FREE
    """Gather for the backward; FREE if the parameters stay."""
    reduce: Cost = FREE
    across: Cost = FREE
    """All-reduce over the replicas, after the last micro-batch's reduce."""


NOTHING = Transfers()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """Cost of one visit to a block, or to the unit outside of the blocks."""

    name: str
    forward: float
    backward: float
    inline: float = 0.0
    """Collectives of one forward that computing waits for (tensor and context parallelism)."""
    inline_back: float = 0.0
    """Those of one backward."""
    inline_link: Link = "none"
    inline_node_bytes: float = 0.0
    """Bytes that a node sends for those of the forward."""
    inline_node_bytes_back: float = 0.0
    """Bytes that a node sends for those of the backward."""
    transfers: Transfers = NOTHING
    kept: bool = False
    """True if gathered once and reduced once per step, whatever the number of micro-batches."""
    agrees_always: bool = False
    """True if replicas are synchronised after every reduction, as in stock FSDP2; else after a step's
    last."""
    stall: float = 0.0
    """Allocator delay before each gather."""


class Span(NamedTuple):
    """Operation on a stream."""

    name: str
    stream: Stream
    link: Link
    start_s: float
    seconds: float
    micro_batch: int


@dataclass(slots=True)
class StepTimeline:
    """Result of a simulated step."""

    seconds: float = 0.0
    compute_s: float = 0.0
    exposed_s: dict[Link, float] = field(default_factory=lambda: {"node": 0.0, "network": 0.0})
    """Waiting for collectives, by link."""
    stalled_s: float = 0.0
    busy_s: dict[Link, float] = field(default_factory=lambda: {"node": 0.0, "network": 0.0})
    node_bytes: float = 0.0
    """Bytes that a node sent through its NICs."""
    network_operations: float = 0.0
    """Number of collectives over the network; those that computing waits for in a visit count as one."""
    events: list[Span] = field(default_factory=list)
    """Operations of the simulated micro-batches, if recorded."""


class _Visit(NamedTuple):
    unit: BlockCost
    backward: bool
    micro_batch: int
    gather: Cost
    reduce: Cost
    across: Cost


def simulate(
    units: Sequence[BlockCost],
    *,
    num_micro_batches: int,
    window: int = 2,
    turning: int = 0,
    overlapped: bool = True,
    record: bool = False,
) -> StepTimeline:
    """Simulate one step.

    Args:
        units: in forward order.
        window: gathers whose memory is held at a time, the one in use included; at least 1.
        turning: blocks that stay from the end of a pass for the next; with any, the last unit stays too.
        overlapped: True if collectives run beside computing.
    """
    simulated = min(num_micro_batches, _SIMULATED)
    run = _Simulation(window=window, overlapped=overlapped, record=record)
    marks = []
    for index in range(simulated):
        visits = _visits(units, index, turning=turning, first=index == 0, last=index == simulated - 1)
        run.add(visits)
    for index in range(simulated):
        run.work(until=(index + 1) * 2 * len(units))
        marks.append(run.totals())
    run.drain()
    repeated = num_micro_batches - simulated
    return run.result(marks[0], marks[1], repeated) if repeated else run.result(marks[0], marks[0], 0)


def _visits(units: Sequence[BlockCost], index: int, *, turning: int, first: bool, last: bool) -> list[_Visit]:
    """Return the visits of a micro-batch, forward and back."""
    blocks = len(units) - 1
    begin, end = {*range(turning), *([blocks] if turning else [])}, {*range(blocks - turning, blocks)}
    forward = [
        _Visit(
            unit,
            False,
            index,
            FREE if (unit.kept or place in begin) and not first else unit.transfers.gather,
            FREE,
            FREE,
        )
        for place, unit in enumerate(units)
    ]
    backward = [
        _Visit(
            unit,
            True,
            index,
            FREE if unit.kept or place in end else unit.transfers.again,
            FREE if unit.kept and not last else unit.transfers.reduce,
            unit.transfers.across if last or (unit.agrees_always and not unit.kept) else FREE,
        )
        for place, unit in reversed([*enumerate(units)])
    ]
    return forward + backward


class _Simulation:
    """State of a simulation: when each stream and link is free, and the waiting times."""

    def __init__(self, *, window: int, overlapped: bool, record: bool) -> None:
        self._window, self._overlapped, self._record = max(1, window), overlapped, record
        self._visits: list[_Visit] = []
        self._computed: list[float] = []
        self._gathered: list[tuple[float, Link]] = []
        self._reduced: list[tuple[float, Link]] = []
        self._free: dict[Stream, float] = {"compute": 0.0, "gather": 0.0, "reduce": 0.0}
        self._link: dict[Link, float] = {"none": 0.0, "node": 0.0, "network": 0.0}
        self._timeline = StepTimeline()

    def add(self, visits: list[_Visit]) -> None:
        """Append visits."""
        self._visits += visits

    def work(self, *, until: int) -> None:
        """Compute the visits before `until`, and gather ahead of each as far as the window allows."""
        for index in range(len(self._computed), until):
            ahead = min(index + self._window, len(self._visits))
            while len(self._gathered) < ahead:
                self._gather(len(self._gathered))
            self._compute(index)
            self._reduce(index)

    def drain(self) -> None:
        """Wait for all operations in flight."""
        end, link = max(self._reduced, default=(0.0, "none"))
        self._wait(end, link)

    def totals(self) -> tuple[float, ...]:
        """Return the counters that grow with every micro-batch."""
        line = self._timeline
        exposed, busy = line.exposed_s, line.busy_s
        return (
            self._free["compute"], line.compute_s, exposed["node"], exposed["network"],
            line.stalled_s, busy["node"], busy["network"], line.node_bytes, line.network_operations,
        )  # fmt: skip

    def result(self, before: tuple[float, ...], after: tuple[float, ...], repeated: int) -> StepTimeline:
        """Return the step extended by `repeated` micro-batches equal to that between two snapshots."""
        total = self.totals()
        end, compute, node, network, stalled, node_busy, busy, sent, operations = (
            value + repeated * (a - b) for value, a, b in zip(total, after, before, strict=True)
        )
        return StepTimeline(
            end, compute, {"node": node, "network": network}, stalled,
            {"node": node_busy, "network": busy}, sent, operations, self._timeline.events,
        )  # fmt: skip

    def _gather(self, index: int) -> None:
        visit = self._visits[index]
        if visit.gather is FREE:
            self._gathered.append((0.0, "none"))
            return
        freed = index - self._window
        ready = self._computed[freed] if freed >= 0 else 0.0
        if visit.unit.stall:  # the allocator waits for everything, frees and retries
            ready = max(ready, *self._free.values())
            self._wait(ready, visit.gather.link)
            self._free["compute"] = ready = ready + visit.unit.stall
            self._timeline.stalled_s += visit.unit.stall
        end = self._collective(visit.gather, "gather", ready, visit)
        self._gathered.append((end, visit.gather.link))

    def _compute(self, index: int) -> None:
        visit, timeline = self._visits[index], self._timeline
        self._wait(*self._gathered[index])
        if len(self._reduced) >= _REDUCTIONS:
            self._wait(*self._reduced[-_REDUCTIONS])
        unit = visit.unit
        seconds = unit.backward if visit.backward else unit.forward
        inline = unit.inline_back if visit.backward else unit.inline
        start = self._free["compute"]
        self._free["compute"] = start + seconds + inline
        timeline.compute_s += seconds
        if inline:
            timeline.exposed_s[unit.inline_link] += inline
            timeline.node_bytes += unit.inline_node_bytes_back if visit.backward else unit.inline_node_bytes
            timeline.network_operations += unit.inline_link == "network"
        if self._record:
            timeline.events.append(
                Span(unit.name, "compute", "none", start, seconds + inline, visit.micro_batch)
            )
        self._computed.append(self._free["compute"])

    def _reduce(self, index: int) -> None:
        visit = self._visits[index]
        for cost in (visit.reduce, visit.across):
            if cost is not FREE:
                ready = max(self._computed[index], self._reduced[-1][0] if self._reduced else 0.0)
                end = self._collective(cost, "reduce", ready, visit)
                self._reduced.append((end, cost.link))

    def _collective(self, cost: Cost, stream: Stream, ready: float, visit: _Visit) -> float:
        """Run a collective at its turn; return its end time."""
        timeline, link = self._timeline, cost.link
        busy = stream if self._overlapped else "compute"
        start = max(ready, self._free[busy], self._link[link])
        end = start + cost.seconds
        if not self._overlapped:
            timeline.exposed_s[link] += end - self._free["compute"]
        self._free[busy] = self._link[link] = end
        timeline.busy_s[link] += cost.seconds
        timeline.node_bytes += cost.node_bytes
        timeline.network_operations += link == "network"
        if self._record:
            timeline.events.append(
                Span(visit.unit.name, stream, link, start, cost.seconds, visit.micro_batch)
            )
        return end

    def _wait(self, until: float, link: Link) -> None:
        waited = until - self._free["compute"]
        if waited > 0:
            self._timeline.exposed_s[link] += waited
            self._free["compute"] = until
