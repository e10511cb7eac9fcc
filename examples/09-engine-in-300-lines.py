"""An inference engine on one page: continuous batching over a paged KV cache, on Penstock's own scheduler.

    python examples/09-engine-in-300-lines.py CORPUS

`penstock.engine.scheduling` decides, in integers, which positions of which sequences a step computes, and in
which blocks of the cache their keys and values lie. `penstock.models` is the network. This page is everything
between the two, in plain PyTorch:

    plan = scheduler.schedule(now)       which positions: one per decoding sequence, or a chunk of a prompt
    hidden = model.hidden(batch(plan))   one forward pass over all of them; attention reads the pages
    scheduler.commit(plan, tokens)       append the sampled tokens; other sequences may now share full blocks

`penstock serve` adds kernels (C++ on CPUs, Triton on GPUs), CUDA graphs, several ranks, adapters, grammars,
drafts, log-probabilities, text and HTTP. Its greedy answers are the same, as the last lines check.
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock import LLM, EngineConfig, Params, Sampling
from penstock.checkpoint.hf import load_pretrained, save_pretrained
from penstock.core import clock
from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool
from penstock.engine.scheduling.scheduler import Scheduler, StepLimits
from penstock.engine.scheduling.sequence import ScheduledTokens, Sequence, StepPlan
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.attention import Attend
from penstock.nn.init import init_weights
from penstock.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
"""Positions per block of the KV cache."""


# --- The KV cache: one large tensor per layer, of which a sequence owns blocks in any order


class Pages:
    """Keys and values of all sequences: per layer [2 (keys, values), slots, kv_heads, head_dim].

    Slot `block * BLOCK_SIZE + offset` holds one position. Nothing is ever moved or copied: a sequence grows
    by one more block number, and two sequences with the same beginning share their first blocks.
    """

    def __init__(self, config: DecoderConfig, num_blocks: int, dtype: torch.dtype) -> None:
        shape = (2, num_blocks * BLOCK_SIZE, config.key_value_heads, config.size_of_head)
        self.layers = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]


def slots_of(sequence: Sequence, stop: int) -> Tensor:
    """Return the slots of the positions 0 to `stop` of a sequence, [stop] int64."""
    blocks = torch.tensor(list(sequence.tables[0].blocks))
    positions = torch.arange(stop)
    return blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


# --- A step: tokens of all shares in one row, and attention that keeps the sequences apart


@dataclass(frozen=True)
class LayerOfStep:
    """The cache of one layer in one step; the network hands it the step's keys and values."""

    pages: Tensor
    slots: Tensor
    """[t] int64, the slot of each token of the step."""

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the step, [1, kv_heads, t, head_dim]; return all pages."""
        self.pages[0, self.slots] = keys[0].transpose(0, 1)
        self.pages[1, self.slots] = values[0].transpose(0, 1)
        return self.pages[0], self.pages[1]


@dataclass(frozen=True)
class Step:
    """What the network asks of a cache, for the tokens of one plan."""

    shares: tuple[ScheduledTokens, ...]
    layers: list[LayerOfStep]

    def attends(self, windows: Iterable[int | None]) -> list[Attend]:
        """Return the attention of each layer."""
        return [self.attend(window) for window in windows]

    def attend(self, window: int | None) -> Attend:
        """Return the attention of one layer: each share sees the pages of its own sequence."""

        def attention(q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
            outputs, first = [], 0
            for share in self.shares:
                stop = share.start + share.num_tokens
                slots = slots_of(share.sequence, stop)
                query = q_bhld[:, :, first : first + share.num_tokens]
                key, value = (pages[slots].transpose(0, 1)[None] for pages in (k_bksd, v_bksd))
                mask = visible(share.start, stop, window)
                outputs.append(
                    scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
                )
                first += share.num_tokens
            return torch.cat(outputs, dim=2)

        return attention


def visible(start: int, stop: int, window: int | None) -> Tensor:
    """Return which of the positions 0 to `stop` each of `start` to `stop` sees, [queries, keys] bool.

    >>> visible(1, 3, None).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    distance = torch.arange(start, stop)[:, None] - torch.arange(stop)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


# --- Sampling: a random number is a function of seed and position, so neighbours never change an answer


def sample(logits: Tensor, sequence: Sequence) -> int:
    """Return the next token of a sequence from its logits, [vocab]."""
    sampling = sequence.request.sampling
    if sampling.temperature == 0:
        return int(logits.argmax())
    generator = torch.Generator().manual_seed(sampling.seed * 1_000_003 + len(sequence.tokens))
    probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


# --- The engine


class Engine:
    """Answers any number of requests, a step at a time.

    Args:
        num_blocks: size of the KV cache. When it is full, the scheduler preempts the last sequence, which is
            computed again later; its answer is the same.
        tokens_per_step: positions per step; a long prompt is computed in chunks, beside decoding sequences.
    """

    def __init__(self, model: Decoder, *, num_blocks: int, max_sequences: int, tokens_per_step: int) -> None:
        self.model = model
        self.pages = Pages(model.config, num_blocks, model.embed.weight.dtype)
        limits = StepLimits(
            max_sequences=max_sequences,
            tokens_per_step=tokens_per_step,
            block_size=BLOCK_SIZE,
        )
        self.scheduler = Scheduler(limits, BlockPool(num_blocks))
        self._ids = count()

    def add(self, request: Request) -> Sequence:
        """Queue a request; the returned sequence's `tokens` grow until it has a `finish`."""
        number = next(self._ids)
        sequence = Sequence(
            id=number, request_id=number, answer=0, request=request, tokens=list(request.prompt)
        )
        self.scheduler.add(sequence)
        return sequence

    @torch.inference_mode()
    def step(self) -> StepPlan:
        """Compute one step: schedule, run, sample, commit."""
        plan = self.scheduler.schedule(clock.monotonic())
        sampling = [share for share in plan.shares if share.samples]
        logits = self._run(plan)
        tokens = [sample(row, share.sequence) for row, share in zip(logits, sampling, strict=True)]
        self.scheduler.commit(plan, [[token] for token in tokens])
        for share, token in zip(sampling, tokens, strict=True):
            if token in share.sequence.request.stop_ids:
                self.scheduler.finish(share.sequence, "stop")  # it ends the others itself, by their counts
        return plan

    def _run(self, plan: StepPlan) -> Tensor:
        """Return the logits after the last token of each share that samples, [shares, vocab]."""
        ids: list[int] = []
        positions: list[int] = []
        slots, last = [], []
        for share in plan.shares:
            stop = share.start + share.num_tokens
            ids += share.sequence.tokens[share.start : stop]
            positions += range(share.start, stop)
            slots.append(slots_of(share.sequence, stop)[share.start :])
            if share.samples:
                last.append(len(ids) - 1)
        layers = [LayerOfStep(pages, torch.cat(slots)) for pages in self.pages.layers]
        hidden = self.model.hidden(
            torch.tensor([ids]), position_ids=torch.tensor([positions]), cache=Step(plan.shares, layers)
        )
        return self.model.logits(hidden[0, last])

    def steps(self) -> Iterator[StepPlan]:
        """Compute steps until every sequence has finished."""
        while self.scheduler.has_work:
            yield self.step()


# --- At work: 24 prompts through a cache that holds about half of them


def random_model(folder: Path, tokenizer: Tokenizer) -> Path:
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Decoder(config)
    init_weights(model, seed=0)
    save_pretrained(model.state_dict(), config, folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def main(corpus: Path) -> None:
    tokenizer = Tokenizer.load(corpus / "tokenizer.json")
    system = "You are a patient librarian. You answer every question in one short and friendly sentence. "
    questions = [f"{system}Question {n}: {'why? ' * n}" for n in range(24)]
    prompts = [tuple(tokenizer.encode(question)) for question in questions]
    greedy = Sampling(temperature=0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch) / "model", tokenizer)
        engine = Engine(load_pretrained(folder), num_blocks=48, max_sequences=16, tokens_per_step=64)
        answers = [engine.add(Request(prompt=p, max_tokens=32, sampling=greedy)) for p in prompts]
        for number, plan in enumerate(engine.steps()):
            if number % 10 == 0:
                chunks = sum(share.num_tokens > 1 for share in plan.shares)
                print(
                    f"step {number}: {len(plan.shares) - chunks} sequences decode, {chunks} prompts prefill, "
                    f"{engine.scheduler.pool.num_used} blocks in use, {len(engine.scheduler.waiting)} wait"
                )
        counts = engine.scheduler.counts
        print(
            f"{counts.num_found} prompt tokens came from the prefix cache, {counts.num_preempted} preemptions"
        )

        with LLM(folder, EngineConfig()) as llm:  # the same answers from the engine that serves
            expected = llm.generate(prompts, Params(sampling=greedy, max_tokens=32))
        same = sum(
            tuple(answer.tokens[answer.num_prompt :]) == wanted.token_ids
            for answer, wanted in zip(answers, expected, strict=True)
        )
        print(f"{same} of {len(answers)} answers equal those of penstock.LLM")
        assert same == len(answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
