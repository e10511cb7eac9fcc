"""Doctor's entry point: run the checks on this machine, or on all machines of a job."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from penstock.core import clock
from penstock.core.env import local_world_size, ranks
from penstock.core.errors import PenstockError, UsageError
from penstock.core.network.probe import probe_nics
from penstock.doctor.checks import (
    copies,
    corpus,
    devices,
    disk,
    gpus,
    interfaces,
    kernel,
    object_store,
    processors,
    speeds,
    ulimits,
    variables,
)
from penstock.doctor.checks.check import Check, CheckOptions, Finding, of_check, red, yellow
from penstock.doctor.collective import CollectiveResult, is_worth_trying, reduce_together, size_for
from penstock.doctor.judge_links import second_opinions, slow_crossings
from penstock.doctor.link import LinkMeasurement, better, link_of
from penstock.doctor.node_group import Member, NodeGroup, ends_of, host_name, rounds
from penstock.doctor.pair import measure_pair
from penstock.doctor.report import DoctorReport, put_together, traits_of
from penstock.launch.nodes.node import named
from penstock.parallel.rendezvous import open_store

_LOCAL_S = 120.0
"""Time limit for all checks of one machine; the others then continue without it."""
_SECOND_S = 30.0
"""Seconds for which a dead link may be told from a dead end, once the time of all links is over."""
_TURN_WAITS = 8
"""Number of time limits that a pair may wait for in one turn, per interface."""


def examine(
    options: CheckOptions, *, timeout_s: float, on_check: Callable[[str], None] = lambda _: None
) -> DoctorReport | None:
    """Examine the machines; return the report on the first rank, None on others.

    Args:
        timeout_s: time limit of a message between nodes; ranks may start that far apart.
        on_check: called with the name of the next check.

    Raises:
        PenstockError: the first rank cannot host the store, or the others do not answer.
    """
    start, who, num_local = clock.monotonic(), ranks(), local_world_size()
    num_nodes = max(1, who.world_size // num_local)
    if num_nodes > 1 and who.local_rank:
        return None  # one rank examines a machine
    options = replace(options, num_nodes=num_nodes)
    node, num_parties = (who.rank, who.world_size) if num_nodes == 1 else (who.rank // num_local, num_nodes)
    nics = named(options.networks, probe_nics()) if options.networks else probe_nics()
    me = Member(node=node, host=host_name(), ends=ends_of(nics, num_nodes=num_nodes))
    try:
        store = open_store(who, timeout_s=timeout_s)
    except PenstockError as error:
        if isinstance(error, UsageError) or who.rank == 0:
            raise
        return _alone(me, options, on_check, error, num_local=num_local)
    party = NodeGroup(store, me, num_expected=num_parties)
    party.gather(timeout_s=timeout_s)
    findings, facts = examine_here(options, on_check) if who.local_rank == 0 else ([], {})
    party.exchange("ready", True, timeout_s=_LOCAL_S)
    on_check("links")
    links, unmeasured = _links(party, options, timeout_s=timeout_s)
    outcome = _collective(party, links, timeout_s=timeout_s)
    mine = {
        "findings": [asdict(finding) for finding in findings],
        "links": [asdict(link) for link in links],
        "collective": asdict(outcome) if outcome else None,
        "traits": traits_of(facts) if facts else {},
    }
    reports = party.exchange("report", mine, timeout_s=_TURN_WAITS * timeout_s)  # gloo fails slowly
    party.leave(timeout_s=timeout_s)
    if not party.leads:
        return None
    return put_together(
        party,
        reports,
        facts,
        unmeasured,
        num_nodes=num_nodes,
        num_local=num_local,
        seconds=clock.monotonic() - start,
    )


def _alone(
    me: Member,
    options: CheckOptions,
    on_check: Callable[[str], None],
    error: PenstockError,
    *,
    num_local: int,
) -> DoctorReport:
    """Return the report of a machine that cannot reach the others."""
    start = clock.monotonic()
    findings, facts = examine_here(options, on_check)
    remedy = "See which nodes the others' report misses."
    cut_off = red(str(error).removesuffix("."), remedy=remedy, check="nodes")
    return DoctorReport(
        hosts={me.node: me.host},
        findings=[replace(finding, nodes=(me.node,)) for finding in [*findings, cut_off]],
        facts=facts,
        links=[],
        num_nodes=options.num_nodes,
        num_local=num_local,
        seconds=clock.monotonic() - start,
    )


def examine_here(
    options: CheckOptions, on_check: Callable[[str], None] = lambda _: None
) -> tuple[list[Finding], dict[str, Any]]:
    """Run the checks of this machine; return their findings and facts.

    Raises:
        UsageError: an option is invalid.
    """
    findings: list[Finding] = []
    facts = {}
    for name, check in CHECKS.items():
        if options.only and name not in options.only:
            continue
        on_check(name)
        try:
            facts[name] = check.measure(options)
            findings += of_check(name, check.judge(facts[name]))
        except UsageError:
            raise
        except PenstockError as error:
            remedy = "Mend that, and run this again."
            findings.append(red(str(error).removesuffix("."), remedy=remedy, check=name))
        except OSError as error:
            remedy = "Run this as the user of the run, on its machine."
            findings.append(yellow(f"Not measured: {error}", remedy=remedy, check=name))
    return findings, facts


def _links(party: NodeGroup, options: CheckOptions, *, timeout_s: float) -> tuple[list[LinkMeasurement], int]:
    """Measure with every other node in turn; return this node's links, and the number of pairs left out.

    Links that look slow are measured once more at the end: other traffic may have been the cause.
    """
    if len(party.members) < 2:
        return [], 0
    nodes = [member.node for member in party.members]
    every = [[(nodes[a], nodes[b]) for a, b in pairs] for pairs in rounds(len(nodes))]
    found: dict[tuple[int, str, str], LinkMeasurement] = {}

    start = clock.monotonic()

    def take(
        turns: list[list[tuple[int, int]]],
        only: list[dict[int, str]],
        *,
        attempt: int,
        least_s: float = 0.0,
    ) -> int:
        def turn(number: int) -> None:
            for other in _partners(party, turns[number]):
                for link in measure_pair(
                    party, other, attempt=attempt, only=only[number], timeout_s=timeout_s
                ):
                    key = (link.target, link.source_nic, link.target_nic)
                    found[key] = better(found[key], link) if key in found else link

        slow_s = _TURN_WAITS * timeout_s * max(len(member.ends) + 1 for member in party.members)
        left_s = max(least_s, options.links_s - (clock.monotonic() - start))
        return party.take_turns(len(turns), turn, attempt=attempt, bound_s=left_s, slow_s=slow_s)

    taken = take(every, [{}] * len(every), attempt=0)
    first = _of_all(party, "first", list(found.values()), timeout_s=timeout_s)
    if doubtful := second_opinions(party.members, first):
        crossings = [{one.node: one.nic, other.node: other.nic} for one, other in doubtful]
        pairs = [[(one.node, other.node)] for one, other in doubtful]
        take(pairs, crossings, attempt=2, least_s=_SECOND_S)
        first = _of_all(party, "second", list(found.values()), timeout_s=timeout_s)
    slow = slow_crossings(first)
    take([[(a.node, b.node)] for a, b in slow], [dict(crossing) for crossing in slow], attempt=1)
    known = {tuple(sorted((one.node, other.node))) for one, other in doubtful}
    return list(found.values()), sum(pair not in known for pairs in every[taken:] for pair in pairs)


def _of_all(
    party: NodeGroup, kind: str, mine: list[LinkMeasurement], *, timeout_s: float
) -> list[LinkMeasurement]:
    """Return the measurements of all nodes, in the same order on each."""
    sent = party.exchange(f"{kind}-links", [asdict(link) for link in mine], timeout_s=timeout_s)
    return [link_of(raw) for _, links in sorted(sent.items()) for raw in links]


def _collective(
    party: NodeGroup, mine: list[LinkMeasurement], *, timeout_s: float
) -> CollectiveResult | None:
    """Run one collective of all nodes, if every link between them is sound."""
    links = _of_all(party, "last", mine, timeout_s=timeout_s)
    if not is_worth_trying(links, num_nodes=len(party.members)):
        return None
    return reduce_together(party, num_bytes=size_for(links), timeout_s=timeout_s)


def _partners(party: NodeGroup, pairs: list[tuple[int, int]]) -> list[Member]:
    """Return the partner of this node in a turn: one at most."""
    others = [sum(pair) - party.me.node for pair in pairs if party.me.node in pair]
    return [member for member in party.members if member.node in others]


CHECKS: Mapping[str, Check] = {
    module.CHECK: module
    for module in (
        devices,
        gpus,
        copies,
        processors,
        ulimits,
        interfaces,
        variables,
        kernel,
        speeds,
        disk,
        object_store,
        corpus,
    )
}
