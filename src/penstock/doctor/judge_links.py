"""Link judgement: attributes bad links to an interface, or to a pair if neither end is at fault.

A fault that an interface shows with every partner is that interface's; others are between two nodes. With two
nodes there is only one partner, so the pair is named. Pure functions.
"""

from collections.abc import Iterator, Sequence
from statistics import multimode
from typing import NamedTuple

from penstock.doctor.checks.check import Finding, green, red, yellow
from penstock.doctor.link import LinkFault, LinkMeasurement
from penstock.doctor.node_group import LOOPBACK, Member, matched

CHECK, _CLOCKS = "links", "clocks"

_SLOW, _SLOWISH = 0.5, 0.75
"""Ratio to the fastest link's speed below which a link is slow. Collectives run at the slowest one's."""
_LOSSY, _SOMEWHAT_LOSSY = 0.01, 0.002
"""Share of lost packets above which a link is bad, and worth a line: TCP's speed falls with its root."""
_MAX_SECOND_OPINIONS = 4
"""Pairs that are measured in any case to find the culprit of a dead link."""
_FAR, _FAR_S = 10.0, 0.002
"""A round trip this many times the usual one, and at least so many seconds longer, is worth a line."""
_CLOCKS_APART_S, _CLOCKS_FAR_APART_S = 0.1, 60.0
"""Tolerated clock difference: 0.1 s confuses the order of log events; a minute breaks object stores and
TLS."""


class Endpoint(NamedTuple):
    """Interface of a node."""

    node: int
    nic: str

    def __str__(self) -> str:
        return f"{self.nic} of node {self.node}"


def judge_links(members: Sequence[Member], links: Sequence[LinkMeasurement]) -> Iterator[Finding]:
    """Yield findings on the links between nodes, with the end at fault.

    Args:
        links: every direction that was measured.
    """
    bad = bad_links(links)
    yield from _dead(links, bad[_DEAD])
    yield from _losing(links, bad[_LOSING], bad[_STALLS])
    alive = [link for link in links if link.gbit_s]
    yield from _lossy(alive)
    yield from _slow(alive)
    yield from _far(alive)
    yield from _summary(alive)
    yield from _clocks(alive)
    yield from _mtus(members)


_DEAD, _LOSING, _STALLS, _IS_SLOW = "passes nothing", "loses large packets", "transfers hang", "is slow"
_LOSES = "loses packets"


def bad_links(links: Sequence[LinkMeasurement]) -> dict[str, set[LinkMeasurement]]:
    """Return the links of each kind of fault that makes a run fail, hang or crawl."""
    alive = [] if _is_one_machine(links) else [link for link in links if link.gbit_s]
    best = max((link.gbit_s for link in alive), default=0.0)
    return {
        _DEAD: {link for link in links if link.fault is LinkFault.DEAD},
        _LOSING: {link for link in links if link.loses_packets},
        _STALLS: {link for link in links if link.fault is LinkFault.STALLS},
        _LOSES: {link for link in links if link.lost_share > _LOSSY},
        _IS_SLOW: {link for link in alive if link.gbit_s < _SLOW * best},
    }


def ends_of_links(links: Sequence[LinkMeasurement]) -> set[Endpoint]:
    """Return every interface that was measured."""
    return {end for link in links for end in _ends(link)}


def _is_one_machine(links: Sequence[LinkMeasurement]) -> bool:
    """Return True if the links are those of processes of one machine, which share memory and cores."""
    return any(link.source_nic == LOOPBACK.name for link in links)


def slow_crossings(links: Sequence[LinkMeasurement]) -> list[tuple[Endpoint, Endpoint]]:
    """Return the pairs of interfaces with a slow link, the lower node first."""
    alive = [link for link in links if link.gbit_s]
    slow = {link for link in alive if link.gbit_s < _SLOWISH * max(other.gbit_s for other in alive)}
    return _pairs(slow)


def second_opinions(
    members: Sequence[Member], links: Sequence[LinkMeasurement]
) -> list[tuple[Endpoint, Endpoint]]:
    """Return the pairs of interfaces to measure next, so that each dead link has a culprit; a few at most.

    Where the time was over after a dead link, each end may have met no other partner: it is tried with one
    that a live link has, else with one that was not measured.
    """
    _, pairs = culprits(links, bad_links(links)[_DEAD])
    alive = {end for link in links if link.fault is LinkFault.NONE for end in _ends(link)}
    dead = {end for pair in pairs for end in pair}
    met = {frozenset(_ends(link)) for link in links}
    found: list[tuple[Endpoint, Endpoint]] = []
    for end in sorted(dead):
        if end in alive or any(end in pair for pair in found):
            continue
        mine = next(member for member in members if member.node == end.node)
        facing = [
            Endpoint(other.node, theirs.name)
            for other in members
            if other is not mine
            for own, theirs in matched(mine.ends, other.ends)
            if own.name == end.nic
        ]
        open_ = [one for one in facing if frozenset((end, one)) not in met]
        if partner := min(open_, key=lambda one: (one in dead, one not in alive, one), default=None):
            found.append((min(end, partner), max(end, partner)))
    return found[:_MAX_SECOND_OPINIONS]


def culprits(
    links: Sequence[LinkMeasurement], bad: set[LinkMeasurement]
) -> tuple[list[Endpoint], list[tuple[Endpoint, Endpoint]]]:
    """Return the interfaces that explain bad links, and the pairs that no interface explains.

    An interface explains its links if it has several partners and the links with all of them are bad, in at
    least one direction.
    """
    found: list[Endpoint] = []
    left = set(bad)
    for place in sorted({end for link in bad for end in _ends(link)}):
        for end_of in (_source, _target):
            mine = {link for link in links if end_of(link) == place}
            partners = {link.source + link.target - place.node for link in mine}
            if mine and mine <= bad and len(partners) > 1:
                found.append(place)
                left -= {link for link in bad if place in _ends(link)}
    return list(dict.fromkeys(found)), _pairs(left)


def _pairs(links: set[LinkMeasurement]) -> list[tuple[Endpoint, Endpoint]]:
    """Return the pairs of interfaces of some links, both directions as one."""
    return sorted({(min(_ends(link)), max(_ends(link))) for link in links})


def _source(link: LinkMeasurement) -> Endpoint:
    return Endpoint(link.source, link.source_nic)


def _target(link: LinkMeasurement) -> Endpoint:
    return Endpoint(link.target, link.target_nic)


def _ends(link: LinkMeasurement) -> tuple[Endpoint, Endpoint]:
    return _source(link), _target(link)


class _Blame(NamedTuple):
    """Interface or pair at fault, with its bad links."""

    who: str
    links: set[LinkMeasurement]
    between: str
    """Text for a link that passes nothing: "between a and b", or "to or from a"."""


def _blamed(links: Sequence[LinkMeasurement], bad: set[LinkMeasurement]) -> list[_Blame]:
    """Return each interface or pair at fault; an interface name at fault on every node, once."""
    places, pairs = culprits(links, bad)
    groups: list[tuple[str, list[Endpoint]]] = []
    for nic in dict.fromkeys(place.nic for place in places):
        mine = [place for place in places if place.nic == nic]
        everywhere = {place for link in links for place in _ends(link) if place.nic == nic} == set(mine)
        groups += (
            [(f"{nic} of every node", mine)] if everywhere else [(str(place), [place]) for place in mine]
        )
    found = [
        _Blame(who, {link for link in bad if set(group) & set(_ends(link))}, f"to or from {who}")
        for who, group in groups
    ]
    for first, second in pairs:
        theirs = {link for link in bad if set(_ends(link)) == {first, second}}
        found.append(_Blame(f"{first} and {second}", theirs, f"between {first} and {second}"))
    return found


def _dead(links: Sequence[LinkMeasurement], dead: set[LinkMeasurement]) -> Iterator[Finding]:
    for blame in _blamed(links, dead):
        yield red(
            f"Nothing passes {blame.between}",
            remedy="Check cable, switch port, firewall, and that both lie in one network; or leave the "
            "interface out of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        )


def _losing(
    links: Sequence[LinkMeasurement], losing: set[LinkMeasurement], stalled: set[LinkMeasurement]
) -> Iterator[Finding]:
    """Yield findings on lost packets of some size, or on transfers that hang, which has the same cause."""
    for who, theirs, _ in _blamed(links, losing):
        packet = max(link.packet_bytes for link in theirs)
        arriving = min(link.arriving_bytes for link in theirs)
        yield red(
            f"Packets of {packet:,} bytes get lost at {who}, those of up to {arriving:,} arrive: the MTU is "
            "wrong",
            remedy=f"Let switches pass {packet:,} bytes, or on all nodes: ip link set NAME mtu {arriving}.",
        )
    for who, _, _ in _blamed(links, stalled - losing):
        yield red(
            f"Small messages pass at {who}, and transfers hang",
            remedy="Look for an MTU that a switch does not pass, or a firewall that ends connections.",
        )


def _lossy(alive: Sequence[LinkMeasurement]) -> Iterator[Finding]:
    lossy = bad_links(alive)[_LOSES]
    somewhat = {link for link in alive if link.lost_share > _SOMEWHAT_LOSSY} - lossy
    for level, bad in ((red, lossy), (yellow, somewhat)):
        for who, theirs, _ in _blamed(alive, bad):
            worst = max(theirs, key=lambda link: link.lost_share)
            yield level(
                f"{who}: {100 * worst.lost_share:.2g}% of packets get lost from node {worst.source} to node "
                f"{worst.target}",
                remedy="They are sent again, and all wait. Check cable, transceiver and switch port, and the "
                "error counters of both (ethtool -S).",
            )


def _slow(alive: Sequence[LinkMeasurement]) -> Iterator[Finding]:
    if _is_one_machine(alive):
        return
    best = max((link.gbit_s for link in alive), default=0.0)
    slow = bad_links(alive)[_IS_SLOW]
    slowish = {link for link in alive if link.gbit_s < _SLOWISH * best} - slow
    for level, bad in ((red, slow), (yellow, slowish)):
        for who, theirs, _ in _blamed(alive, bad):
            worst = min(theirs, key=lambda link: link.gbit_s)
            way = f"from node {worst.source} to node {worst.target}"
            yield level(
                f"{who}: {_speed(worst.gbit_s)} {way}, where the fastest link has {_speed(best)}",
                remedy="All wait for the slowest. Check the cable, the speed and errors of its port "
                "(ethtool, ethtool -S), and whether others use the network.",
            )


def _far(alive: Sequence[LinkMeasurement]) -> Iterator[Finding]:
    """Yield links whose messages take many times as long as most."""
    trips = sorted(link.round_trip_s for link in alive)
    if _is_one_machine(alive) or not trips:
        return
    usual = trips[len(trips) // 4]  # of three nodes, one that is far has two thirds of the links
    far = {link for link in alive if link.round_trip_s > max(_FAR * usual, usual + _FAR_S)}
    for who, theirs, _ in _blamed(alive, far):
        worst = max(link.round_trip_s for link in theirs)
        yield yellow(
            f"{who}: round trip {1e3 * worst:.2f} ms, where others have {1e3 * usual:.2f} ms",
            remedy="Check for a detour (traceroute), a full queue, or another site behind this address.",
        )


def _summary(alive: Sequence[LinkMeasurement]) -> Iterator[Finding]:
    for nics in sorted({(link.source_nic, link.target_nic) for link in alive if link.source < link.target}):
        mine = [link for link in alive if {link.source_nic, link.target_nic} == set(nics)]
        speeds = [link.gbit_s for link in mine]
        trips = sorted(link.round_trip_s for link in mine)
        name = nics[0] if nics[0] == nics[1] else " - ".join(nics)
        yield green(
            f"{name}: {_speed(min(speeds))} to {_speed(max(speeds))} one way, round trip "
            f"{1e3 * trips[len(trips) // 2]:.2f} ms, {len(mine)} directions"
        )


def _clocks(alive: Sequence[LinkMeasurement]) -> Iterator[Finding]:
    """Yield nodes whose clock differs from that of the lowest node they were measured with."""
    sure = sorted(alive, key=lambda link: (link.target, link.source, link.round_trip_s))
    apart = {link.target: link for link in reversed(sure) if link.source < link.target}
    far = [link for link in apart.values() if _surely_ahead(link) > _CLOCKS_APART_S]
    for link in far:
        level = red if _surely_ahead(link) > _CLOCKS_FAR_APART_S else yellow
        word = "ahead of" if link.clock_ahead_s > 0 else "behind"
        yield level(
            f"The clock of node {link.target} is {abs(link.clock_ahead_s):.2f} s {word} that of node "
            f"{link.source}",
            remedy="Let chrony or systemd-timesyncd run on both: timedatectl set-ntp true.",
            check=_CLOCKS,
        )
    if apart and not far:
        apart_s = max(abs(link.clock_ahead_s) + link.round_trip_s / 2 for link in apart.values())
        yield green(f"They agree within {1e3 * apart_s:.1f} ms", check=_CLOCKS)


def _surely_ahead(link: LinkMeasurement) -> float:
    return abs(link.clock_ahead_s) - link.round_trip_s / 2


def _mtus(members: Sequence[Member]) -> Iterator[Finding]:
    """Yield nodes whose interface has another MTU than most of its peers."""
    counts = {len(member.ends) for member in members}
    if len(counts) > 1:
        told = ", ".join(f"{len(member.ends)} on node {member.node}" for member in members)
        yield yellow(
            f"The nodes have different numbers of interfaces: {told}",
            remedy=f"Collectives use the {min(counts)} that all have; see the lines on interfaces.",
        )
    for mtus in _rails(members):
        usual = max(multimode(mtus.values()))  # in a tie the larger, which was probably intended
        for place, mtu in mtus.items():
            if mtu != usual:
                yield yellow(
                    f"{place} has an MTU of {mtu:,}, where others have {usual:,}: TCP copes, RDMA and "
                    "datagrams do not",
                    remedy=f"On node {place.node}: ip link set {place.nic} mtu {usual}",
                )


def _rails(members: Sequence[Member]) -> list[dict[Endpoint, int]]:
    """Return the MTUs of interfaces in one network."""
    found: dict[str, dict[Endpoint, int]] = {}
    for member in members:
        for index, end in enumerate(member.ends):
            elsewhere = [theirs.network for other in members if other is not member for theirs in other.ends]
            rail = end.network if end.network in elsewhere else str(index)
            found.setdefault(rail, {})[Endpoint(member.node, end.name)] = end.mtu
    return list(found.values())


def _speed(gbit_s: float) -> str:
    """Return a speed as text.

    >>> _speed(0.021), _speed(94.2)
    ('21 Mbit/s', '94.2 Gbit/s')
    """
    return f"{gbit_s:.3g} Gbit/s" if gbit_s >= 1 else f"{1000 * gbit_s:.3g} Mbit/s"
