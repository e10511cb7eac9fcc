"""Options of an evaluation, on text or on tasks; imports neither torch nor lm-eval."""

from dataclasses import dataclass
from typing import Annotated, Literal

from penstock.core.checks import check_whole
from penstock.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvalOptions:
    """Options of an evaluation on text: which rows of which corpora."""

    corpus: Annotated[tuple[str, ...], "[NAME=]CORPUS"] = ()
    """Folder, address or FORMAT:PATH[,option=value]."""
    rows: int | None = None
    """At most N rows of each corpus. None: all."""
    sequence_length: Annotated[int | None, "L"] = None
    """Tokens per row. None: the context, at most 4096."""
    holdout: Annotated[float | None, "SHARE"] = None
    """Score only the documents that this value of data.holdout holds out.

    None: all documents."""
    compute: Literal["float32", "bfloat16"] | None = None
    """Dtype of the computation. None: that of the run's recipe, else float32."""

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range."""
        for name, value in (("rows", self.rows), ("sequence_length", self.sequence_length)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1", got=value)
        if not 0 <= (self.holdout or 0.0) < 1:
            raise UsageError("holdout must be from 0 to less than 1", got=self.holdout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Options of an evaluation on tasks; those of lm-eval keep its meaning."""

    shots: int | None = None
    """Examples in front of each question; None: as the task says, else 0. A task that says 0 keeps 0."""
    limit: int | None = None
    """Questions of each task, the first ones; None: all."""
    chat_template: bool = False
    """Write questions as messages, by the model's chat template."""
    multiturn: bool = True
    """Examples are turns of the conversation; False: write all examples into one message."""
    system: str | None = None
    """System message in front of each question; None: none."""
    max_gen_toks: int = 256
    """Tokens of an answer whose task does not say how many."""
    fewshot_seed: int = 1234
    """Random seed of the examples that are drawn per question."""
    bootstrap: int = 1000
    """Resamples for standard errors that have no formula, such as a perplexity's; lm-eval takes 100,000."""
    log_samples: bool = False
    """Keep each question with its answer in the results, which pairs them when two results are compared."""
    download: bool = False
    """Let tasks download data sets and metrics."""
    trust_tasks: bool = False
    """Let task files run Python code: their `!function`, and what their templates can reach."""

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range."""
        if self.shots is not None:
            check_whole("shots", self.shots, 0, fix="Leave it out for the task's own number.")
        if self.limit is not None:
            check_whole("limit", self.limit, 1, fix="Leave it out for all questions.")
        check_whole("max_gen_toks", self.max_gen_toks, 1, fix="Leave it out for 256.")
        check_whole("fewshot_seed", self.fewshot_seed, 0, 2**63 - 1, fix="Leave it out for 1234.")
        check_whole("bootstrap", self.bootstrap, 0, 10**6, fix="0 computes no such standard error.")
        if self.system is not None and not self.chat_template and not self.system.strip():
            raise UsageError("The system message is empty", got=self.system, fix="Leave it out.")
