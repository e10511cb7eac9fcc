"""Transformers: `generate` on one padded batch, and its continuous batching."""

import time

import torch


def _model(folder, dtype):
    from transformers import LlamaForCausalLM

    torch.set_grad_enabled(False)
    return LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


class Static:
    """All prompts padded to the longest, and stepped until the longest answer ends."""

    def __init__(self, folder, dtype):
        self._model = _model(folder, dtype)

    def serve(self, requests):
        """Return stamps and numbers of tokens; those beyond an answer's length count for nothing."""
        width = max(len(wanted["prompt"]) for wanted in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, wanted in enumerate(requests):
            ids[row, width - len(wanted["prompt"]) :] = torch.tensor(wanted["prompt"])
            mask[row, width - len(wanted["prompt"]) :] = 1
        longest = max(wanted["max_tokens"] for wanted in requests)
        start, steps = time.perf_counter(), []

        def note(ids, *_, **__):
            steps.append(time.perf_counter() - start)
            return torch.zeros(len(ids), dtype=torch.bool)

        self._model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, min_new_tokens=longest,
            eos_token_id=None, pad_token_id=0, stopping_criteria=[note],
        )  # fmt: skip
        lengths = [wanted["max_tokens"] for wanted in requests]
        return [steps[:length] for length in lengths], lengths


class Continuous:
    """Its continuous batching, with pages for the load of these cases."""

    def __init__(self, folder, dtype):
        pages = {"page_size": 32, "num_blocks": 2048, "max_batch_tokens": 512}
        self._start(_model(folder, dtype), allow_block_sharing=False, **pages)

    @classmethod
    def of(cls, model, **batching):
        """Serve a model that is on its device already.

        Args:
            batching: of its ContinuousBatchingConfig.
        """
        torch.set_grad_enabled(False)
        made = cls.__new__(cls)
        made._start(model, **batching)
        return made

    def _start(self, model, **batching):
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model = model
        self._model.set_attn_implementation("paged|sdpa")
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=2048),
            continuous_batching_config=ContinuousBatchingConfig(**batching),
        )
        self._manager.start()
        self._seen = {}
        self._round = 0

    @property
    def has_work(self):
        """Whether any request has not ended."""
        return bool(self._seen)

    def add(self, index, prompt, max_tokens):
        """Queue a request."""
        self._round += 1
        name = f"{index}/{self._round}"
        self._seen[name] = 0
        self._manager.add_request(prompt, name, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1)

    def step(self):
        """Wait for something; return the indices that got a token."""
        result = self._manager.get_result(timeout=0.05)
        if result is None:
            if not self._manager.is_running():
                raise RuntimeError("its thread ended")
            return []
        if result.error:
            raise RuntimeError(result.error)
        name = result.request_id
        new = len(result.generated_tokens) - self._seen[name]
        self._seen[name] += new
        if result.is_finished():
            del self._seen[name]
        return [int(name.split("/")[0])] * new

    def close(self):
        """End its thread."""
        self._manager.stop(block=True)
