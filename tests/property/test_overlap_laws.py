"""An engine that reads a step after it has launched the next one answers as one that reads each at once."""

from collections import defaultdict
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY, Sampling
from tests.examples import examples
from tests.hashing_engine import hashing_engine
from tests.hashing_model import answer_of

STEM = tuple(range(100, 140))
prompts = st.builds(
    lambda common, own: STEM[:common] + own,
    st.integers(0, 30),
    st.lists(st.integers(0, 9), min_size=1, max_size=9).map(tuple),
)
READ_AT_ONCE = Sampling(temperature=0.0, num_logprobs=0)


def asked(stops):
    """Return arrivals: the step, a request, and after how many steps it is cancelled."""
    requests = st.builds(
        Request,
        prompt=prompts,
        max_tokens=st.integers(1, 20),
        sampling=st.sampled_from([GREEDY, GREEDY, GREEDY, READ_AT_ONCE]),
        num_answers=st.sampled_from([1, 1, 1, 3]),
        priority=st.sampled_from([0, 0, 1]),
        client=st.sampled_from(["x", "y"]),
        adapter=st.sampled_from([None, None, "a"]),
        task=st.sampled_from(["generate"] * 5 + ["embed"]),
        deadline_s=st.sampled_from([None, None, None, 7.0, 21.0]),
        stop_ids=stops,
    )
    leaves = st.none() | st.none() | st.integers(0, 20)
    return st.lists(st.tuples(st.integers(0, 15), requests, leaves), min_size=1, max_size=9)


class Played:
    """What came of arrivals in an engine whose clock counts calls of `step`."""

    def __init__(self, arrivals, *, num_blocks, overlaps):
        self.batches, self.deltas, self.ids = [], defaultdict(list), {}
        self.engine = engine = hashing_engine(
            num_blocks=num_blocks,
            overlaps=overlaps,
            before=lambda batch: self.batches.append(batch.positions.tolist()),
        )
        step = 0
        with patch("penstock.core.clock.monotonic", lambda: float(step)):
            while engine.has_work or step <= 15:
                for number, (arrives, request, leaves) in enumerate(arrivals):
                    if arrives == step:
                        self.ids[number] = engine.add(request)
                    if leaves is not None and arrives + leaves == step:
                        engine.cancel(self.ids[number])
                for delta in engine.step():
                    self.deltas[delta.request_id, delta.answer].append(
                        (delta.token_ids, delta.finish, delta.stop_reason, delta.num_cached)
                    )
                engine.scheduler.check()
                step += 1
        assert engine.stats().used_blocks == 0
        assert not engine._token_sampler.known

    @property
    def cached(self):
        """Hashes that the prefix cache has."""
        return set(self.engine.scheduler.pool._by_name)


@given(asked(st.just(frozenset())), st.integers(16, 40))
@examples(150)
def test_where_counts_end_answers_both_engines_compute_the_same_steps(arrivals, num_blocks):
    at_once, later = (
        Played(arrivals, num_blocks=num_blocks, overlaps=overlaps) for overlaps in (False, True)
    )
    assert later.batches == at_once.batches
    assert later.deltas == at_once.deltas
    assert later.cached == at_once.cached
    ours, theirs = later.engine.stats(), at_once.engine.stats()
    for name in ("preemptions", "prefix_asked", "prefix_found"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.counts.sampled == theirs.counts.sampled
    served = [
        {priority: turns.served for priority, turns in played.engine.scheduler.waiting._classes.items()}
        for played in (later, at_once)
    ]
    assert served[0] == served[1]


def expected(request):
    """Return the tokens of an answer, its finish and the token that ended it."""
    tokens = answer_of(request)
    end = next((i for i, token in enumerate(tokens) if token in request.stop_ids), None)
    return (tokens, "length", None) if end is None else (tokens[:end], "stop", tokens[end])


stops = st.integers(3, 12).map(lambda every: frozenset(range(0, 1000, every)))


@given(asked(stops | st.just(frozenset())), st.integers(16, 40))
@examples(150)
def test_where_tokens_end_answers_the_surplus_of_a_step_is_dropped(arrivals, num_blocks):
    played = Played(arrivals, num_blocks=num_blocks, overlaps=True)
    sampled = 0
    for number, (_, request, leaves) in enumerate(arrivals):
        for answer in range(request.num_answers):
            deltas = played.deltas[played.ids[number], answer]
            tokens = [token for delta in deltas for token in delta[0]]
            assert [finish for _, finish, *_ in deltas[:-1]] == [None] * (len(deltas) - 1)
            finish, reason = deltas[-1][1:3]
            sampled += len(tokens) + (finish == "stop" and request.task == "generate")
            if request.task == "embed":
                assert finish == "stop" or leaves is not None or request.deadline_s is not None
            elif finish in ("cancelled", "deadline"):
                assert leaves is not None or request.deadline_s is not None
                assert tokens == expected(request)[0][: len(tokens)]
            else:
                assert (tokens, finish, reason) == expected(request)
    assert played.engine.stats().counts.sampled == sampled
    for _, request, _ in arrivals:  # what lies in the cache now is right: a wrong block gives other tokens
        again = Request(prompt=request.prompt, max_tokens=20, adapter=request.adapter)
        request_id = played.engine.add(again)
        found = []
        while played.engine.has_work:
            found += [t for d in played.engine.step() if d.request_id == request_id for t in d.token_ids]
        assert found == answer_of(again)


@given(asked(stops), st.randoms(use_true_random=False))
@examples(60)
def test_where_nothing_is_evicted_both_engines_cache_the_same_blocks(arrivals, chance):
    arrivals = [(arrives, request, None) for arrives, request, _ in arrivals if request.deadline_s is None]
    chance.shuffle(arrivals)
    at_once, later = (Played(arrivals, num_blocks=400, overlaps=overlaps) for overlaps in (False, True))
    assert later.cached == at_once.cached
    assert later.deltas.keys() == at_once.deltas.keys()
    for key, deltas in later.deltas.items():
        assert [delta[:3] for delta in deltas] == [delta[:3] for delta in at_once.deltas[key]]
