"""Metric names: every metric with unit and meaning, and the file names of a run; defined only here."""

from typing import Final

METRICS_FILE = "metrics.jsonl"
"""Rank 0's records: one per step and per start of the run."""
RANKS_FILE = "ranks.jsonl"
"""Rank 0's records of all ranks: RANK_METRICS of each, every few steps."""
SAMPLES_FOLDER = "samples"
"""Folder of each rank's log of sample ids and checksums."""
CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of the checkpoints, unless the recipe names another place."""
TRACES_FOLDER = "traces"
"""Folder of traces of single steps, if the recipe requests them."""
HANGS_FOLDER = "hangs"
"""Folder of the flight records that ranks wrote before a hung run was ended."""
LEFT_OUT_FILE = "left-out.json"
"""File of the samples left out by rewinds."""
TENSORBOARD_FOLDER = "tensorboard"
"""Folder of event files, if the recipe requests them."""
RECIPE_FILE = "config.json"
"""File of the resolved recipe of the newest start."""
STARTS_FOLDER = "starts"
"""Folder of the resolved recipe of each start, by number and step."""

BY_CORPUS: Final = (
    "corpus_tokens",
    "corpus_padding",
    "corpus_epochs",
    "corpus_weights",
    "corpus_shares",
    "corpus_validation_loss",
    "corpus_perplexity",
    "corpus_bits_per_byte",
)
"""Metrics that are tables by corpus."""

BY_TASK: Final = ("task_scores", "task_stderrs")
"""Metrics that are tables by task and its metric."""

METRICS: Final[dict[str, tuple[str, str]]] = {
    "step": ("steps", "optimizer steps taken, this one counted"),
    "tokens": ("tokens", "tokens trained on since the start of the run"),
    "loss": ("nats/token", "training loss of the step, mean over the labels of all ranks; or over pairs"),
    "labels": ("", "terms that the step's loss is a mean of: learned tokens, or pairs of preferences"),
    "grad_norm": ("", "norm of the whole gradient before clipping"),
    "learning_rate": ("", "learning rate of the step"),
    "tokens_per_s": ("tokens/s", "tokens of the step, learned or not, over its wall time, all ranks"),
    "mfu": ("share", "model FLOPs utilisation: useful FLOP/s over the devices' peak, where that is known"),
    "hfu": ("share", "hardware FLOPs utilisation: as mfu, with activations that were computed twice"),
    "step_s": ("s", "wall time of the step, waiting for data included"),
    "data_wait_share": ("share", "share of the step spent waiting for its batch"),
    "forward_share": ("share", "share of the step in forward passes, the loss included"),
    "backward_share": ("share", "share of the step in backward passes"),
    "communication_share": ("share", "share of the step blocked on other ranks: not hidden by computation"),
    "optimizer_share": ("share", "share of the step clipping the gradient and updating the weights"),
    "checkpoint_s": ("s", "time that training waited for checkpoints, since the step before"),
    "checkpoint_share": ("share", "share of the time since the run's start that it waited for them"),
    "checkpoint_step": ("steps", "step of the newest complete checkpoint; 0: there is none"),
    "device_hours": (
        "device-hours",
        "time of all processes since the run's first start, through its jobs; time between them left out",
    ),
    "memory_bytes": ("bytes", "peak memory of the process, or of its GPU"),
    "corpus_tokens": ("tokens", "tokens of each corpus in the run so far, padding included, by name"),
    "corpus_padding": ("tokens", "of those, padding positions, by name"),
    "corpus_epochs": ("passes", "epochs of each corpus so far, by name"),
    "corpus_weights": ("share", "share of samples requested of each corpus in this step, by name"),
    "corpus_shares": ("share", "share of samples served of each corpus since that mixture began, by name"),
    "reward_chosen": ("nats", "mean reward of chosen answers, or of wanted ones: beta times the log-ratio"),
    "reward_rejected": ("nats", "mean reward of rejected answers"),
    "reward_margin": ("nats", "difference of the two"),
    "reward_accuracy": (
        "share",
        "share of pairs whose chosen answer has the higher reward; of single answers, "
        "those wanted with a reward above 0, or not wanted with one below",
    ),
    "log_prob_chosen": ("nats", "mean log-probability of chosen answers; for simpo too a sum over tokens"),
    "log_prob_rejected": ("nats", "mean log-probability of rejected answers"),
    "kto_divergence": ("nats", "mean log-ratio of mismatched answers, at least 0; KTO's z"),
    "validation_loss": (
        "nats/token",
        "mean loss on held-out documents; with pairs or single answers, per each",
    ),
    "validation_perplexity": ("", "exp of the validation loss"),
    "validation_bits_per_byte": ("bits/byte", "validation loss over the bytes of text, for any tokenizer"),
    "validation_reward_chosen": ("nats", "reward_chosen of held-out answers"),
    "validation_reward_rejected": ("nats", "reward_rejected of held-out answers"),
    "validation_reward_margin": ("nats", "reward_margin of held-out answers"),
    "validation_reward_accuracy": ("share", "reward_accuracy of held-out answers"),
    "validation_log_prob_chosen": ("nats", "log_prob_chosen of held-out answers"),
    "validation_log_prob_rejected": ("nats", "log_prob_rejected of held-out answers"),
    "validation_kto_divergence": ("nats", "kto_divergence of held-out answers"),
    "corpus_validation_loss": ("nats/token", "mean loss on held-out documents of each corpus, by name"),
    "corpus_perplexity": ("", "exp of that loss, by name"),
    "corpus_bits_per_byte": ("bits/byte", "that loss over the bytes of text, by name"),
    "task_scores": ("", "scores of the tasks of [evaluate], by task and metric"),
    "task_stderrs": ("", "standard errors of these scores, where a formula gives them"),
    "evaluation_s": ("s", "time that training waited for the tasks of [evaluate]"),
}

RANK_METRICS: Final[dict[str, tuple[str, str]]] = {
    "own_s": ("s", "time of a step that the rank was not blocked on others: a straggler's is longer"),
    "data_wait_s": ("s", "of that, time spent waiting for its batch"),
    "blocked_s": ("s", "time blocked on other ranks: a straggler's is shorter"),
    "memory_bytes": ("bytes", "peak memory of the process, or of its GPU"),
    "sent_bytes": ("bytes", "bytes sent to other ranks in a step"),
}
"""Metrics of each rank in RANKS_FILE, as means of a step."""

SERVING: Final[dict[str, tuple[str, str]]] = {
    "penstock_requests": ("requests", "Requests by route and status; 499: the client left."),
    "penstock_time_to_first_token_seconds": ("s", "From a request to the first token of an answer (TTFT)."),
    "penstock_inter_token_seconds": ("s", "Between a token of an answer and the one before it."),
    "penstock_request_seconds": ("s", "From a request of /v1/ to the end of its answer."),
    "penstock_answers_waiting": ("answers", "Answers not begun, or pre-empted."),
    "penstock_answers_running": ("answers", "Answers in progress."),
    "penstock_cache_blocks": ("blocks", "Blocks of the KV cache."),
    "penstock_cache_blocks_used": ("blocks", "Blocks of the cache held by answers in progress."),
    "vllm:num_requests_waiting": ("answers", "penstock_answers_waiting, by the name that gateways read."),
    "vllm:num_requests_running": ("answers", "penstock_answers_running, by the name that gateways read."),
    "vllm:kv_cache_usage_perc": ("share", "Share of the KV cache in use, by the name that gateways read."),
    "penstock_computed_tokens": ("tokens", "Positions computed, of prompts and of answers."),
    "penstock_answer_tokens": ("tokens", "Tokens of answers sampled."),
    "penstock_prefix_asked_tokens": ("tokens", "Tokens looked up in the prefix cache."),
    "penstock_prefix_found_tokens": ("tokens", "Prompt tokens found in the cache."),
    "penstock_preemptions": ("answers", "Preemptions: times an answer lost its blocks to another."),
    "penstock_drafted_tokens": ("tokens", "Tokens guessed."),
    "penstock_accepted_tokens": ("tokens", "Drafted tokens that became part of an answer."),
    "penstock_steps": ("steps", "Steps of the engine."),
    "penstock_failed_steps": ("steps", "Steps that failed and ended the answers in them."),
}
"""Metrics of the server in Prometheus format; counters there end in `_total`."""

_SPELLED: Final = {"step_s": "step_seconds", "checkpoint_s": "checkpoint_seconds"}
_TRAIN: Final = "penstock_train_"


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint.

    >>> checkpoint_name(1200)
    'step-00001200'
    """
    return f"step-{step:08d}"


def training_metric(name: str) -> str:
    """Return the name in Prometheus format of a metric of a run.

    >>> training_metric("loss"), training_metric("step_s"), training_metric("tokens_per_s")
    ('penstock_train_loss', 'penstock_train_step_seconds', 'penstock_train_tokens_per_second')
    """
    return _TRAIN + _SPELLED.get(name, name.replace("_per_s", "_per_second"))


TRAINING: Final[dict[str, tuple[str, str]]] = {
    **{training_metric(name): row for name, row in METRICS.items()},
    "penstock_train_steps_wanted": ("steps", "Steps of the whole run (run.steps)."),
    "penstock_train_checkpoint_every": ("steps", "Steps between checkpoints (checkpoint.every)."),
    "penstock_train_last_record_timestamp_seconds": (
        "s",
        "Unix time of the newest record, of a step, a validation or an event; at first, of the start.",
    ),
    "penstock_train_skipped_steps": ("steps", "Steps skipped by the guard since this process started."),
    "penstock_train_steps_not_finite": ("steps", "Skipped steps whose loss or gradient was not finite."),
}
"""Metrics of a training run in Prometheus format, gauges by `run`; counters there end in `_total`."""
