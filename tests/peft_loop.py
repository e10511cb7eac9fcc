"""Tuning by peft and transformers in a plain loop: losses and gradients that Penstock's must equal."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from penstock.nn.linear.dropout import Dropout, token_keys
from penstock.train.data_setup import train_loader
from penstock.train.recipe.config import TrainConfig

PROJECTIONS = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj",
    "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
}  # fmt: skip
_PARTS = {"lora_a": "lora_A.default.weight", "lora_b": "lora_B.default.weight",
          "magnitude": "lora_magnitude_vector.default.weight"}  # fmt: skip


def peft_model(recipe: TrainConfig) -> Any:  # Any: PeftModel
    """Return the model of a recipe's run.start_from with the adapter of its [tune], by peft."""
    base = AutoModelForCausalLM.from_pretrained(
        recipe.run.start_from, dtype=torch.float32, attn_implementation="eager"
    )
    adapter = recipe.adapter
    if adapter is None:
        return base
    if adapter.new_rows:  # their values are the adapter's
        base.resize_token_embeddings(recipe.model.vocab_size, mean_resizing=False)
    new = [*range(recipe.run.start_vocab_size, recipe.model.vocab_size)]
    return get_peft_model(
        base,
        LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            target_modules=[
                *(PROJECTIONS[name] for name in adapter.layers),
                *(["lm_head"] if adapter.unembed else []),
            ]
            if not adapter.pattern
            else adapter.pattern,
            layers_to_transform=list(adapter.blocks) or None,
            exclude_modules=list(adapter.excluded) or None,
            lora_dropout=adapter.dropout,
            modules_to_save=list(recipe.tune.modules_to_save) if recipe.tune and adapter.saved else None,
            ensure_weight_tying=bool(adapter.saved and recipe.model.tie_word_embeddings),
            rank_pattern=dict(adapter.ranks),
            alpha_pattern=dict(adapter.alphas),
            use_rslora=adapter.method == "rslora",
            use_dora=adapter.method == "dora",
            trainable_token_indices=dict.fromkeys(token_layers(recipe), new) if new else None,
        ),
    )


def token_layers(recipe: TrainConfig) -> list[str]:
    """Return the names of the layers whose new rows are learned."""
    return ["embed_tokens"] if recipe.model.tie_word_embeddings else ["embed_tokens", "lm_head"]


def peft_names(recipe: TrainConfig) -> dict[str, str]:
    """Return the name of each parameter that is learned in the model of `peft_model`, by ours."""
    theirs = {name: rows.tensor for name, rows in recipe.model.stored_rows.items()}
    adapter = recipe.adapter
    if adapter is None:
        frozen = recipe.tune.frozen(recipe.model) if recipe.tune else ()
        return {ours: name for ours, name in theirs.items() if ours not in frozen}
    found = {}
    for ours, name in theirs.items():
        if adapter.trains(ours):
            module, _, kind = name.rpartition(".")
            found[ours] = f"base_model.model.{module}.modules_to_save.default.{kind}"
            continue
        if ours in ("embed.weight", "unembed.weight") and adapter.new_rows:
            where = f"base_model.model.{name.removesuffix('.weight')}"
            found[ours.replace("weight", "new_rows")] = (
                f"{where}.token_adapter.trainable_tokens_delta.default"
            )
            continue
        *_, layer, kind = ours.split(".")
        is_matrix = kind == "weight" and layer in PROJECTIONS
        if (is_matrix and adapter.of(ours.removesuffix(".weight"))) or (
            ours == "unembed.weight" and adapter.unembed
        ):
            for part, peft in _PARTS.items():
                if part != "magnitude" or adapter.has_magnitudes:
                    where = f"base_model.model.{name.removesuffix('.weight')}.{peft}"
                    found[f"{ours.removesuffix('.weight')}.{part}"] = where
    return found


def peft_loop(
    recipe: TrainConfig, initial: dict[str, Tensor], *, gradients_of: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of all steps, and the gradients of one by our names, before clipping.

    Args:
        initial: the adapter's first values, by our names; ours are drawn otherwise than peft's.
        gradients_of: number of the step, from 1.
    """
    model, names = peft_model(recipe), peft_names(recipe)
    theirs = dict(model.named_parameters())
    learned = {ours: theirs[name] for ours, name in names.items()}
    for parameter in set(theirs.values()) - set(learned.values()):
        parameter.requires_grad_(False)
    with torch.no_grad():
        for name, value in initial.items():
            learned[name].copy_(value)
    masks = masked_by_hand(model)
    optim = recipe.optim
    groups = [
        {"params": [p for p in learned.values() if p.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in learned.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.learning_rate, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    losses, found = [], {}
    batches = iter(train_loader(recipe, rank=0, world_size=1, deliver="torch"))
    for batch in batches:
        for mask in masks:
            mask.keys = token_keys(
                batch["sample_ids"], recipe.data.sequence_length, seed=recipe.run.seed, step=len(losses) + 1
            )
        logits = model(
            batch["input_ids"], position_ids=batch["position_ids"], attention_mask=_mask(batch)
        ).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        losses.append(loss.item())
        if len(losses) == gradients_of:
            found = {name: p.grad.clone() for name, p in learned.items()}
        torch.nn.utils.clip_grad_norm_(list(learned.values()), optim.clip_norm)
        adamw.step()
        adamw.zero_grad()
        if len(losses) == recipe.run.steps:
            break
    batches.close()
    return losses, found


class MaskedByHand(torch.nn.Module):
    """Takes the place of peft's dropout, with the masks of a run."""

    keys: Tensor

    def __init__(self, rate: float, layer: str) -> None:
        super().__init__()
        self.dropout = Dropout.of(rate, layer)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.dropout.kept(self.keys, x.shape[-1])
        return x * kept / (1 - self.dropout.num_dropped / 2**16)


def masked_by_hand(model: Any) -> list[MaskedByHand]:  # Any: PeftModel
    """Replace the dropout of a peft model's layers, in place."""
    ours = {name: own for own, name in PROJECTIONS.items()}
    found = []
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Dropout) and ".lora_dropout." in name:
            *_, block, owner, kind = name.partition(".lora_dropout")[0].split(".")
            layer = f"layers.{block}.{owner.replace('self_attn', 'attention')}.{ours[kind]}"
            found.append(MaskedByHand(module.p, layer))
            model.set_submodule(name, found[-1])
    return found


def _mask(batch: dict[str, Tensor]) -> Tensor:
    """Return [rows, 1, queries, keys]: 0 where a query sees a key of its document, else the lowest number."""
    rows, length = batch["input_ids"].shape
    starts = torch.zeros(rows * length, dtype=torch.int64)
    starts[batch["cu_seqlens"][:-1].long()] = 1
    document = starts.cumsum(0).view(rows, length)
    sees = (document[:, :, None] == document[:, None, :]) & torch.ones(length, length).tril().bool()
    return torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]


def folder_of(where: Path, config: Any, *, seed: int = 1) -> Path:  # Any: of transformers
    """Write a model of random weights as transformers does."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(where)
    return where
