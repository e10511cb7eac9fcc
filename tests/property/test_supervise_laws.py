"""Laws of the supervisor: whatever happens, in whatever order, it ends for a reason and never too late."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.launch.local import EXIT_STOPPED
from penstock.launch.supervise import (
    BY_REQUEST,
    EXIT_NO_PROGRESS,
    Act,
    Decision,
    Ended,
    NodesCame,
    NodesLost,
    Phase,
    ResizeAsked,
    RestartPolicy,
    Started,
    StopAsked,
    SupervisorState,
    advance,
)

steps = st.integers(min_value=-1, max_value=50)
codes = st.sampled_from([0, 1, 2, 3, EXIT_STOPPED, EXIT_NO_PROGRESS, 137])
events = st.one_of(
    st.builds(Started, ranks=st.integers(1, 8), newest=steps),
    st.builds(
        Ended,
        code=codes,
        newest=steps,
        cause=st.sampled_from(["", "Rank 1 failed."]),
        lost_node=st.booleans(),
    ),
    st.builds(StopAsked, cause=st.sampled_from(["SIGTERM", "SIGINT"])),
    st.builds(NodesCame, num_nodes=st.integers(1, 3)),
    st.builds(NodesLost, num_nodes=st.integers(1, 3)),
    st.builds(ResizeAsked, num_nodes=st.integers(1, 3)),
)
policies = st.builds(
    RestartPolicy, idle_starts=st.integers(1, 4), is_elastic=st.booleans(), can_requeue=st.booleans()
)


def fed(state, happenings, policy):
    """Return the states and decisions, in order."""
    found = []
    for event in happenings:
        state, decision = advance(state, event, policy)
        found.append((state, decision))
    return found


@given(st.lists(events, max_size=30), policies)
def test_each_decision_has_a_cause_and_nothing_follows_the_end(happenings, policy):
    ended = False
    for state, decision in fed(SupervisorState(), happenings, policy):
        assert not (ended and decision.act is not Act.NOTHING)
        assert (decision.act is Act.NOTHING) == (decision.cause == "")
        assert (decision.act is Act.FINISH) <= (state.phase is Phase.ENDED)
        assert decision.code == (state.code if decision.act is Act.FINISH else 0)
        ended = state.phase is Phase.ENDED


@given(st.lists(events, max_size=30), policies)
def test_the_newest_checkpoint_never_goes_back(happenings, policy):
    seen = [state.newest for state, _ in fed(SupervisorState(), happenings, policy)]
    assert seen == sorted(seen)


@given(st.lists(events, max_size=30), policies)
def test_a_run_is_told_to_stop_once_in_each_attempt(happenings, policy):
    stops = 0
    for event, (_, decision) in zip(happenings, fed(SupervisorState(), happenings, policy), strict=True):
        stops = 0 if isinstance(event, Started) else stops + (decision.act is Act.STOP)
        assert stops <= 1 or isinstance(event, Started | Ended)


@given(st.lists(st.booleans(), max_size=60), policies)
def test_failures_are_bounded_by_progress_and_not_by_number(progress, policy):
    policy = replace(policy, can_requeue=False)
    state, newest, idle = SupervisorState(), -1, 0
    for is_new in progress:
        state, _ = advance(state, Started(ranks=2, newest=newest), policy)
        newest += is_new
        idle = 0 if is_new else idle + 1
        state, decision = advance(state, Ended(code=1, newest=newest), policy)
        if idle == policy.idle_starts:
            assert (decision.act, decision.code) == (Act.FINISH, EXIT_NO_PROGRESS)
            return
        assert decision.act is Act.START
        assert decision.pause_s == policy.pause_after(idle)


@given(
    st.lists(st.booleans(), max_size=30), policies, st.booleans(), st.sampled_from(["SIGTERM", BY_REQUEST])
)
def test_stops_that_put_a_job_back_into_the_queue_are_bounded_by_progress(progress, policy, is_lost, sender):
    policy, newest, idle = replace(policy, can_requeue=True), -1, 0
    for is_new in progress:
        state = SupervisorState(idle=idle, newest=newest)  # what is kept across requeues
        state, _ = advance(state, Started(ranks=2, newest=newest), policy)
        state, _ = advance(state, StopAsked(cause=sender), policy)
        newest += is_new
        idle = 0 if is_new else idle + 1
        ended = Ended(code=1 if is_lost else EXIT_STOPPED, newest=newest, lost_node=is_lost)
        state, decision = advance(state, ended, policy)
        is_bounded = idle >= policy.idle_starts and sender != BY_REQUEST
        assert (decision.act, decision.code) == (Act.FINISH, EXIT_NO_PROGRESS if is_bounded else EXIT_STOPPED)
        if is_bounded or sender == BY_REQUEST:
            return


@given(
    st.lists(events, max_size=20), policies, codes.filter(lambda code: code not in (0, 2, EXIT_NO_PROGRESS))
)
def test_whoever_is_told_to_stop_never_starts_again(happenings, policy, code):
    state = SupervisorState()
    state = [state, *(each for each, _ in fed(state, happenings, policy))][-1]
    state, decision = advance(state, StopAsked(cause="SIGTERM"), policy)
    if state.phase is Phase.ENDED:
        return
    assert state.phase is Phase.STOPPING
    state, decision = advance(state, Ended(code=code, newest=60), policy)
    assert (decision.act, decision.code) == (Act.FINISH, code)


@given(policies)
def test_nodes_that_come_and_go_cost_an_elastic_run_no_failure(policy):
    policy, state = replace(policy, is_elastic=True), SupervisorState()
    for turn in range(10):
        state, _ = advance(state, Started(ranks=2, newest=turn - 1), policy)
        event = NodesCame(num_nodes=1) if turn % 2 else NodesLost(num_nodes=1)
        state, decision = advance(state, event, policy)
        assert decision.act is Act.STOP
        ended = Ended(code=1 if turn % 3 == 0 else EXIT_STOPPED, newest=turn)
        state, decision = advance(state, ended, policy)
        assert (decision.act, decision.pause_s) == (Act.START, 0.0)


@given(policies, st.sampled_from([EXIT_STOPPED, 1]), st.booleans())
def test_a_node_that_joins_and_fails_again_and_again_waits_for_a_checkpoint(policy, code, is_lost):
    policy, state, stops = replace(policy, is_elastic=True), SupervisorState(), 0
    came = NodesCame(num_nodes=1, newest=7, running_s=policy.longest_join_pause_s)
    for _ in range(policy.idle_starts):
        state, _ = advance(state, Started(ranks=2, newest=7), policy)
        state, decision = advance(state, came, policy)
        stops += decision.act is Act.STOP
        state, decision = advance(state, Ended(code=code, newest=7), policy)
        assert decision.act is Act.START
        if is_lost:  # the node that joined is gone before the first step
            state, _ = advance(state, Started(ranks=3, newest=7), policy)
            state, _ = advance(state, NodesLost(num_nodes=1), policy)
            state, _ = advance(state, Ended(code=1, newest=7), policy)
    assert stops == policy.idle_starts
    state, _ = advance(state, Started(ranks=2, newest=7), policy)
    state, decision = advance(state, came, policy)
    assert decision.act is Act.NOTHING, "the others train on"
    state, decision = advance(state, replace(came, newest=8), policy)
    assert decision.act is Act.STOP, "there is a new checkpoint"


@given(policies, st.integers(1, 12))
def test_nodes_that_join_and_are_lost_soon_wait_ever_longer_though_they_bring_checkpoints(policy, times):
    policy, state, newest = replace(policy, is_elastic=True), SupervisorState(), 0
    for joins in range(times):
        pause_s = policy.join_pause_after(joins)
        newest += 1
        state, decision = advance(state, Started(ranks=2, newest=newest), policy)
        assert decision.act is (Act.DELAY_JOINS if pause_s else Act.NOTHING)
        if pause_s:
            early = NodesCame(num_nodes=1, newest=newest, running_s=pause_s - 1)
            assert advance(state, early, policy) == (state, Decision(act=Act.NOTHING))
        state = joined(state, newest, policy, running_s=pause_s)
        state, _ = advance(state, Ended(code=1, newest=newest + 1, ran_s=policy.settled_s - 1), policy)
    state, _ = advance(state, Started(ranks=2, newest=newest), policy)
    assert state.short_joins == times


@given(policies)
def test_a_join_that_lasts_ends_the_pauses(policy):
    policy, state = replace(policy, is_elastic=True), SupervisorState(short_joins=5)
    state, _ = advance(state, Started(ranks=2, newest=7), policy)
    state = joined(state, 7, policy, running_s=policy.longest_join_pause_s)
    state, _ = advance(state, Ended(code=1, newest=8, ran_s=policy.settled_s), policy)
    state, decision = advance(state, Started(ranks=2, newest=8), policy)
    assert (state.short_joins, decision.act) == (0, Act.NOTHING)


def joined(state, newest, policy, *, running_s):
    """Return the state after a node has joined two ranks."""
    state, decision = advance(state, NodesCame(num_nodes=1, newest=newest, running_s=running_s), policy)
    assert decision.act is Act.STOP
    state, _ = advance(state, Ended(code=EXIT_STOPPED, newest=newest), policy)
    return advance(state, Started(ranks=3, newest=newest), policy)[0]


def test_losses_without_a_join_before_them_delay_no_joins():
    policy, state = RestartPolicy(is_elastic=True), SupervisorState()
    for newest, ranks in enumerate((5, 4, 3, 2)):
        state, decision = advance(state, Started(ranks=ranks, newest=newest), policy)
        assert (state.phase, state.short_joins, decision.act) == (Phase.RUNNING, 0, Act.NOTHING)
        state, _ = advance(state, Ended(code=1, newest=newest + 1), policy)
