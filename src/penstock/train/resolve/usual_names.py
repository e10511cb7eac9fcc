"""Option names of other trainers (transformers, Lightning, Megatron-LM, nanoGPT, torchtitan), for hints."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, get_args, get_type_hints

from penstock.core.config import UnknownKey
from penstock.core.errors import ConfigError
from penstock.train.recipe.config import TrainConfig

# fmt: off
NAMES: Final[dict[str, str]] = {
    "optim.learning_rate": "lr max_lr peak_lr base_lr",
    "optim.rule": "optimizer optimizer_name optimizer_type",
    "optim.beta1": "betas adam_beta1",
    "optim.beta2": "betas adam_beta2",
    "optim.eps": "epsilon adam_eps adam_epsilon",
    "optim.weight_decay": "wd decay",
    "optim.clip_norm": "grad_clip clip_grad gradient_clip_val gradient_clipping max_grad_norm max_norm",
    "schedule.rule": "lr_schedule lr_scheduler lr_scheduler_type scheduler lr_decay_style",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters",
    "schedule.warmup_ratio": "warmup_fraction lr_warmup_fraction warmup_proportion",
    "schedule.final_share": "min_lr min_lr_ratio lr_min eta_min",
    "run.steps": "max_steps num_steps total_steps train_steps training_steps max_iters train_iters"
                 " num_iterations",
    "run.epochs": "num_epochs max_epochs num_train_epochs n_epochs",
    "run.dir": "out out_dir output_dir save_dir default_root_dir run_dir log_dir",
    "run.seed": "random_seed manual_seed",
    "data.global_batch_size": "batch batch_size bs train_batch_size total_batch_size",
    "data.micro_batch_size": "batch_size per_device_train_batch_size device_batch_size local_batch_size"
                             " train_micro_batch_size_per_gpu grad_accum grad_accum_steps grad_acc_steps"
                             " gradient_accumulation gradient_accumulation_steps accumulate_grad_batches",
    "data.sequence_length": "seq_len seq_length seqlen max_seq_len max_seq_length block_size context"
                            " context_length context_size n_ctx max_length",
    "data.corpora.NAME.path": "dataset dataset_path dataset_name data_path train_data train_file",
    "data.num_workers": "workers num_dataloader_workers dataloader_num_workers",
    "checkpoint.every": "save_every save_steps save_interval save_freq checkpoint_interval ckpt_every",
    "checkpoint.keep": "save_total_limit save_top_k keep_last keep_latest_k",
    "validate.every": "eval_every eval_steps eval_interval val_interval val_check_interval",
    "validate.samples": "eval_iters eval_samples limit_val_batches",
    "model.num_hidden_layers": "n_layer n_layers num_layers layers depth",
    "model.hidden_size": "n_embd d_model dim model_dim hidden_dim embed_dim",
    "model.intermediate_size": "d_ff ffn_dim ffn_hidden_size mlp_dim hidden_ffn_size",
    "model.num_attention_heads": "n_head n_heads num_heads heads",
    "model.num_key_value_heads": "n_kv_heads num_kv_heads kv_heads num_query_groups",
    "model.vocab_size": "n_vocab vocab padded_vocab_size",
    "parallel.shard": "fsdp dp_shard data_parallel_shard_degree fsdp_size zero_stage",
    "parallel.replicate": "dp ddp data_parallel data_parallel_replicate_degree",
    "parallel.tensor": "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree"
                       " tensor_model_parallel_size",
    "parallel.pipeline": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree"
                         " pipeline_model_parallel_size",
    "parallel.context": "cp cp_size context_parallel context_parallel_size context_parallel_degree",
    "recompute.policy": "activation_checkpointing activation_checkpoint gradient_checkpointing"
                        " checkpoint_activations",
    "compute": "dtype torch_dtype bf16 fp16 precision mixed_precision amp",
    "tune.method": "adapter peft_type use_dora use_rslora",
    "tune.rank": "lora_r r lora_rank",
    "tune.alpha": "lora_alpha",
    "tune.dropout": "lora_dropout",
    "tune.modules_to_save": "lora_modules_to_save",
    "tune.freeze": "frozen_parameters freeze_layers",
    "tune.layers": "target_modules lora_target_modules lora_target_linear lora_modules",
    "tune.base": "load_in_8bit load_in_4bit",
    "run": "train training trainer",
    "optim": "optimizer adam adamw",
    "schedule": "scheduler lr_scheduler",
    "validate": "eval evaluation validation",
    "checkpoint": "checkpoints checkpointing",
}
"""Key of a recipe -> its names in other trainers."""
# fmt: on


@contextmanager
def usual_names_explained() -> Iterator[None]:
    """Context manager: errors of unknown keys suggest the key that other trainers name so."""
    try:
        yield
    except UnknownKey as error:
        if known := keys_for(error.key):
            hint = f"Did you mean {' or '.join(map(repr, known))}?"
            raise ConfigError(f"Unknown key {error.key}", fix=hint) from None
        raise


def keys_for(key: str) -> list[str]:
    """Return the recipe keys for a key of another trainer, or of another section.

    >>> keys_for("optim.lr"), keys_for("train.batch-size")
    (['optim.learning_rate'], ['data.global_batch_size', 'data.micro_batch_size'])
    >>> keys_for("optim.warmup_steps")
    ['schedule.warmup_steps']
    """
    section, _, last = key.rpartition(".")
    word = last.lower().replace("-", "_")
    usual = [known for known, names in NAMES.items() if word in names.split()]
    elsewhere = [known for known in _keys() if known.rpartition(".")[2] == word]
    found = list(dict.fromkeys([*usual, *elsewhere]))
    own = [known for known in found if known.rpartition(".")[0] == section]
    return own or found


def _keys() -> Iterator[str]:
    """Yield all keys of a recipe's sections."""
    for name, kind in get_type_hints(TrainConfig).items():
        yield name
        for section in filter(dataclasses.is_dataclass, (kind, *get_args(kind))):
            yield from (f"{name}.{field.name}" for field in _fields(section))


def _fields(kind: Any) -> tuple["dataclasses.Field[Any]", ...]:  # Any: a class, known only at run time
    return dataclasses.fields(kind)
