"""What a request does to a loader: shares, skips, extensions, refusals that leave everything as it was."""

import json

import pytest

from penstock.core import config
from penstock.core.errors import UsageError
from penstock.testing.corpora import write_corpus
from penstock.train.control.apply_request import follow, in_force, known_parts, reweighed, take_up
from penstock.train.control.requests import ControlReply, ControlRequest
from penstock.train.data_setup import train_loader
from penstock.train.resolve.load import build_recipe


@pytest.fixture
def raw(tmp_path):
    corpora = {
        name: {"path": str(write_corpus(tmp_path / name, [[1] * 6] * 200, vocab_size=50)), "weight": weight}
        for name, weight in (("web", 5), ("code", 3), ("wiki", 2))
    }
    return {
        "run": {"dir": str(tmp_path / "run"), "steps": 50},
        "model": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        "data": {"corpora": corpora, "sequence_length": 16, "global_batch_size": 10, "num_workers": 0},
    }


def opened(raw, *settings, steps=0):
    recipe = build_recipe(config.override(raw, list(settings)))
    loader = train_loader(recipe, rank=0, world_size=1, deliver="numpy")
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    batches.close()
    return recipe, loader


def ids(loader, steps):
    return [loader.samples_of(step).tolist() for step in steps]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"web": 0.6}, {"web": 0.6, "code": 0.24, "wiki": 0.16}),
        ({"web": 0.6, "code": 0.4}, {"web": 0.6, "code": 0.4, "wiki": 0.0}),
        ({"wiki": 0.0}, {"web": 0.625, "code": 0.375, "wiki": 0.0}),
        ({"web": 1.0}, {"web": 1.0, "code": 0.0, "wiki": 0.0}),
        ({"web": 0.1, "code": 0.1, "wiki": 0.8}, {"web": 0.1, "code": 0.1, "wiki": 0.8}),
    ],
)
def test_what_is_named_gets_its_share_and_the_others_keep_their_proportions(shares, expected):
    assert reweighed({"web": 0.5, "code": 0.3, "wiki": 0.2}, shares) == pytest.approx(expected)


def test_shares_that_leave_a_rest_nobody_can_take_are_refused():
    with pytest.raises(UsageError, match=r"sum to 0\.5, and no other corpus has a share to take the rest"):
        reweighed({"web": 0.5, "code": 0.5}, {"web": 0.2, "code": 0.3})
    with pytest.raises(UsageError, match=r"no such corpus \(got 'wbe'\)\. Did you mean 'web'"):
        reweighed({"web": 0.5, "code": 0.5}, {"wbe": 0.2})


def test_weights_hold_from_the_next_step_and_say_until_when(raw):
    raw["data"]["schedule"] = [{"at_step": 20, "weights": {"web": 1, "code": 0, "wiki": 0}}]
    recipe, loader = opened(raw, steps=5)
    found = take_up(loader, recipe, ControlRequest(number=3, weights={"web": 0.6}, reason="more"))
    assert found.taken_up
    assert (
        found.said
        == "from step 6 on: web 0.6, code 0.24, wiki 0.16, until other weights are planned after step 20"
    )
    assert (found.step, found.holds_from, found.until) == (5, 5, 20)
    assert in_force(loader, 4)["web"] == 0.5
    assert in_force(loader, 5)["web"] == pytest.approx(0.6, abs=1e-4)
    assert loader.mixtures[1][2] == "request 3: more"
    before, after = loader.samples_by_corpus(5), loader.samples_by_corpus(15)
    assert {name: after[name] - before[name] for name in after} == {"web": 60, "code": 24, "wiki": 16}


def test_weights_for_a_later_step_hold_from_there(raw):
    recipe, loader = opened(raw)
    found = take_up(loader, recipe, ControlRequest(number=1, weights={"wiki": 0.8}, at_step=30))
    assert found.holds_from == 30
    assert in_force(loader, 29)["wiki"] == pytest.approx(0.2, abs=1e-4)
    assert in_force(loader, 30)["wiki"] == pytest.approx(0.8, abs=1e-4)


def test_a_skip_leaves_out_the_samples_of_steps_to_come(raw):
    recipe, loader = opened(raw, steps=5)
    found = take_up(loader, recipe, ControlRequest(number=1, skip_steps=(8, 10), reason="spike"))
    assert (found.samples, found.said) == (
        (70, 90),
        "the samples of steps 8 to 9 are skipped; later ones move up",
    )
    assert ids(loader, (6, 7)) == [list(range(60, 70)), list(range(90, 100))]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ControlRequest(weights={"wbe": 0.5}), "no such corpus (got 'wbe'). Did you mean 'web'"),
        (ControlRequest(weights={"web": 0.5}, at_step=4), "5 steps are already done (got 4)"),
        (ControlRequest(weights={"web": 0.5}, at_step=50), "The run ends after 50 steps (got 50)"),
        (
            ControlRequest(skip_steps=(5, 9)),
            "5 steps are already done (got '5:9'). To skip samples that",
        ),
        (ControlRequest(skip_steps=(50, 52)), "The run ends after 50 steps (got '50:52'). Name earlier ones"),
        (ControlRequest(extend="wbe"), "no such corpus (got 'wbe')"),
        (
            ControlRequest(extend="web", parts=1),
            "Corpus 'web' has no parts beyond the 1 that the run uses. Add one first: `penstock data append`",
        ),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(raw, request_, message):
    recipe, loader = opened(raw, steps=5)
    before = loader.state_dict(), loader.mixtures
    found = take_up(loader, recipe, request_)
    assert not found.taken_up
    assert message in found.said
    assert (loader.state_dict(), loader.mixtures) == before


def test_weights_that_would_use_up_a_capped_corpus_are_refused_and_undone(raw):
    recipe, loader = opened(raw, "data.corpora.wiki.epochs=2", steps=5)
    state = loader.state_dict()
    found = take_up(loader, recipe, ControlRequest(number=1, weights={"wiki": 0.9}))
    assert not found.taken_up
    assert "corpus 'wiki' reaches the end of its 2 epochs at step 2" in found.said
    assert loader.state_dict() == state
    assert take_up(loader, recipe, ControlRequest(number=2, weights={"wiki": 0.1})).taken_up


def test_a_refused_request_keeps_what_a_resume_changed_and_what_is_planned(raw):
    _, saved = opened(raw, steps=5)
    recipe, loader = opened(raw, "data.corpora.wiki.epochs=2", "data.corpora.web.weight=6")
    loader.load_state_dict(saved.state_dict(), on_change="apply")
    assert take_up(loader, recipe, ControlRequest(number=1, weights={"wiki": 0.1}, at_step=40)).taken_up
    changes, mixtures = loader.resume_changes, loader.mixtures
    assert [change.setting for change in changes] == ["weights"]
    assert not take_up(loader, recipe, ControlRequest(number=2, weights={"wiki": 0.9})).taken_up
    assert (loader.resume_changes, loader.mixtures) == (changes, mixtures)


def test_a_batch_size_must_do_for_every_number_of_ranks_with_which_the_run_may_go_on(raw):
    recipe, loader = opened(raw, steps=5)
    before = loader.state_dict()
    found = take_up(loader, recipe, ControlRequest(number=1, batch_size=8), sizes=[1, 2, 3])
    assert not found.taken_up
    assert "The run could not continue on some of its allowed numbers of nodes" in found.said
    assert "A global batch of 8 sequences does not divide over 3 ranks" in found.said
    assert loader.state_dict() == before
    assert take_up(loader, recipe, ControlRequest(number=2, batch_size=12), sizes=[1, 2, 3]).taken_up


def test_a_batch_size_after_the_last_step_is_refused_with_what_to_raise(raw):
    recipe, loader = opened(raw, "run.steps=5", steps=5)
    found = take_up(loader, recipe, ControlRequest(number=1, batch_size=12))
    assert not found.taken_up
    assert "no step is left to change (got 5). Raise run.steps" in found.said


def test_where_the_mixture_follows_the_losses_weights_are_refused(raw):
    recipe, loader = opened(raw, "data.adaptive.policy=online_data_mixing")
    found = take_up(loader, recipe, ControlRequest(weights={"web": 0.6}))
    assert "The mixture follows the losses (online_data_mixing), which would override it" in found.said


def test_what_was_decided_after_a_checkpoint_is_done_again_at_the_same_steps(raw):
    """Killed at step 12, resumed from step 6: the run goes on as if nothing had happened."""
    recipe, loader = opened(raw, steps=6)
    state, batches, found = json.loads(json.dumps(loader.state_dict())), iter(loader), []
    for step, request in (
        (8, ControlRequest(number=1, weights={"web": 0.9})),
        (9, ControlRequest(number=2, skip_steps=(15, 17))),
        (11, ControlRequest(number=3, weights={"wiki": 0.7}, at_step=20)),
        (12, ControlRequest(number=4, weights={"wbe": 0.7})),
    ):
        while loader.step < step:
            next(batches)
        found.append(take_up(loader, recipe, request))
    batches.close()
    _, again = opened(raw)
    again.load_state_dict(state)
    saved = [config.build(ControlReply, config.dump(each)) for each in found]
    assert [each.number for each in follow(again, saved)] == [1, 2, 3]
    assert again.mixtures == loader.mixtures
    assert ids(again, range(50)) == ids(loader, range(50))
    assert follow(again, saved), "to do it twice is to do it once"
    assert ids(again, range(50)) == ids(loader, range(50))


def test_a_state_saved_after_a_decision_needs_it_no_more(raw):
    recipe, loader = opened(raw, steps=6)
    found = [
        take_up(loader, recipe, ControlRequest(number=1, weights={"web": 0.9})),
        take_up(loader, recipe, ControlRequest(number=2, skip_steps=(20, 22), reason="a")),
        take_up(loader, recipe, ControlRequest(number=3, skip_steps=(20, 22), reason="b")),
    ]
    next(iter(loader))
    _, again = opened(raw)
    again.load_state_dict(loader.state_dict())
    assert follow(again, found) == []
    assert again.mixtures == loader.mixtures
    assert again.state_dict() == loader.state_dict()


def test_a_run_knows_the_parts_it_began_with(raw):
    assert known_parts(opened(raw)[1], "web") == 1
