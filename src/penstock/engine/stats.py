"""Engine statistics for dashboards and reports; no torch."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class EngineCounters:
    """Totals since the engine was opened; they only increase."""

    steps: int = 0
    """Steps computed."""
    tokens: int = 0
    """Positions computed: prompts, answers, and again after preemption."""
    sampled: int = 0
    """Tokens sampled for answers."""
    drafts: int = 0
    """Draft tokens proposed."""
    drafts_accepted: int = 0
    """Draft tokens accepted."""
    failed_steps: int = 0
    """Steps that failed and ended their answers."""
    schedule_s: float = 0.0
    """Seconds of scheduling and of building batches."""
    run_s: float = 0.0
    """Seconds of forward passes; on an accelerator, of launching them."""
    draw_s: float = 0.0
    """Seconds of sampling and verification; on an accelerator, with the wait for the step."""
    draft_s: float = 0.0
    """Seconds of drafting."""
    answer_s: float = 0.0
    """Seconds of committing and detokenizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Snapshot of the engine, with totals."""

    waiting: int
    """Sequences waiting, preempted ones included."""
    running: int
    """Sequences running."""
    num_blocks: int
    """Blocks of the KV cache."""
    used_blocks: int
    """Blocks used by running sequences."""
    preemptions: int
    """Preemptions."""
    prefix_asked: int
    """Tokens of admitted sequences: prefix cache lookups."""
    prefix_found: int
    """Tokens found in the prefix cache."""
    counts: EngineCounters
    """Totals."""
