"""What an engine did and holds, as numbers for people and dashboards; no torch."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Counts:
    """Totals since the engine was opened; they only grow."""

    steps: int = 0
    """Steps computed."""
    tokens: int = 0
    """Positions computed: of prompts, of answers, and again after a pre-emption."""
    drawn: int = 0
    """Tokens of answers."""
    drafts: int = 0
    """Tokens guessed."""
    drafts_accepted: int = 0
    """Of those, tokens that became part of an answer."""
    failed_steps: int = 0
    """Steps whose failure ended the answers in them."""
    schedule_s: float = 0.0
    """Seconds of deciding what a step computes, and of writing it down for the network."""
    run_s: float = 0.0
    """Seconds in the network."""
    draw_s: float = 0.0
    """Seconds of drawing and verifying."""
    draft_s: float = 0.0
    """Seconds of guessing."""
    answer_s: float = 0.0
    """Seconds of committing, and of turning tokens into text and pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The moment, and the totals."""

    waiting: int
    """Answers not begun, or pre-empted."""
    running: int
    """Answers in the making."""
    num_blocks: int
    """Blocks of the cache."""
    used_blocks: int
    """Of those, held by answers in the making."""
    preemptions: int
    """Times an answer lost its blocks to another."""
    prefix_asked: int
    """Tokens of admitted answers that could have been found computed."""
    prefix_found: int
    """Of those, tokens that were."""
    counts: Counts
    """Totals."""
