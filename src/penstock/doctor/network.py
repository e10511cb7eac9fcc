"""Judge what was measured between nodes: name the interface at fault, or the pair where no one is.

A fault that an end of links shows with every partner is that end's; what is left is between two nodes. With
two nodes there is one partner, so there the pair is named. Pure.
"""

from collections.abc import Iterator, Sequence
from statistics import multimode
from typing import NamedTuple

from penstock.doctor.finding import Finding, green, red, yellow
from penstock.doctor.link import Fault, Link
from penstock.doctor.party import LOOPBACK, Member

CHECK = "links"

_SLOW, _SLOWISH = 0.5, 0.75
"""Share of the fastest link's speed below which a link is slow. Collectives go at the slowest one's."""
_CLOCKS_APART_S, _CLOCKS_FAR_APART_S = 0.1, 60.0
"""A tenth of a second muddles the order of events in logs; a minute is refused by object stores and TLS."""


class Place(NamedTuple):
    """One interface of one node."""

    node: int
    nic: str

    def __str__(self) -> str:
        return f"{self.nic} of node {self.node}"


def judge_links(members: Sequence[Member], links: Sequence[Link]) -> Iterator[Finding]:
    """Say what is wrong between nodes, and on whose side.

    Args:
        links: every direction that was measured.
    """
    dead = {link for link in links if link.fault is Fault.DEAD}
    stalled = {link for link in links if link.fault is Fault.STALLS}
    losing = {link for link in links if link.loses_packets}
    yield from _dead(links, dead)
    yield from _losing(links, losing, stalled)
    alive = [link for link in links if link.gbit_s]
    yield from _slow(alive)
    yield from _summary(alive)
    yield from _clocks(alive)
    yield from _mtus(members)


def slow_crossings(links: Sequence[Link]) -> list[tuple[Place, Place]]:
    """Return the interfaces with a slow link between them, by the present figures; the lower node first."""
    alive = [link for link in links if link.gbit_s]
    slow = {link for link in alive if link.gbit_s < _SLOWISH * max(other.gbit_s for other in alive)}
    return _pairs(slow)


def culprits(links: Sequence[Link], bad: set[Link]) -> tuple[list[Place], list[tuple[Place, Place]]]:
    """Return the interfaces that explain bad links, and the pairs that none of them explains.

    An interface explains its links if it has several partners and the links with all of them are bad, in one
    direction at least.
    """
    found: list[Place] = []
    left = set(bad)
    for place in sorted({end for link in bad for end in _ends(link)}):
        for end_of in (_source, _target):
            mine = {link for link in links if end_of(link) == place}
            partners = {link.source + link.target - place.node for link in mine}
            if mine and mine <= bad and len(partners) > 1:
                found.append(place)
                left -= {link for link in bad if place in _ends(link)}
    return list(dict.fromkeys(found)), _pairs(left)


def _pairs(links: set[Link]) -> list[tuple[Place, Place]]:
    """Return between which interfaces some links are, both directions as one."""
    return sorted({(min(_ends(link)), max(_ends(link))) for link in links})


def _source(link: Link) -> Place:
    return Place(link.source, link.source_nic)


def _target(link: Link) -> Place:
    return Place(link.target, link.target_nic)


def _ends(link: Link) -> tuple[Place, Place]:
    return _source(link), _target(link)


class _Blame(NamedTuple):
    """Who is at fault, and the bad links that show it."""

    who: str
    links: set[Link]
    between: str
    """In words, for what does not pass: "between a and b", or "to or from a"."""


def _blamed(links: Sequence[Link], bad: set[Link]) -> list[_Blame]:
    """Return each interface or pair at fault; an interface name that is at fault everywhere, once."""
    places, pairs = culprits(links, bad)
    groups: list[tuple[str, list[Place]]] = []
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


def _dead(links: Sequence[Link], dead: set[Link]) -> Iterator[Finding]:
    for blame in _blamed(links, dead):
        yield red(
            CHECK,
            f"Nothing passes {blame.between}",
            remedy="Check cable, switch port, firewall, and that both lie in one network; or leave the "
            "interface out of GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.",
        )


def _losing(links: Sequence[Link], losing: set[Link], stalled: set[Link]) -> Iterator[Finding]:
    """Packets of some size are lost, or small messages pass and transfers hang, which is what that does."""
    for who, theirs, _ in _blamed(links, losing):
        packet = max(link.packet_bytes for link in theirs)
        arriving = min(link.arriving_bytes for link in theirs)
        yield red(
            CHECK,
            f"Packets of {packet:,} bytes get lost at {who}, those of up to {arriving:,} arrive: the MTU is "
            "wrong",
            remedy=f"Let switches pass {packet:,} bytes, or on all nodes: ip link set NAME mtu {arriving}.",
        )
    for who, _, _ in _blamed(links, stalled - losing):
        yield red(
            CHECK,
            f"Small messages pass at {who}, and transfers hang",
            remedy="Look for an MTU that a switch does not pass, or a firewall that ends connections.",
        )


def _slow(alive: Sequence[Link]) -> Iterator[Finding]:
    if any(link.source_nic == LOOPBACK.name for link in alive):
        return  # one machine: the processes share its memory and its cores
    best = max((link.gbit_s for link in alive), default=0.0)
    slow = {link for link in alive if link.gbit_s < _SLOW * best}
    slowish = {link for link in alive if link.gbit_s < _SLOWISH * best} - slow
    for level, bad in ((red, slow), (yellow, slowish)):
        for who, theirs, _ in _blamed(alive, bad):
            worst = min(theirs, key=lambda link: link.gbit_s)
            way = f"from node {worst.source} to node {worst.target}"
            yield level(
                CHECK,
                f"{who}: {_speed(worst.gbit_s)} {way}, where the fastest link has {_speed(best)}",
                remedy="All wait for the slowest. Check the cable, the speed and errors of its port "
                "(ethtool, ethtool -S), and whether others use the network.",
            )


def _summary(alive: Sequence[Link]) -> Iterator[Finding]:
    for nics in sorted({(link.source_nic, link.target_nic) for link in alive if link.source < link.target}):
        mine = [link for link in alive if {link.source_nic, link.target_nic} == set(nics)]
        speeds = [link.gbit_s for link in mine]
        trips = sorted(link.round_trip_s for link in mine)
        name = nics[0] if nics[0] == nics[1] else " - ".join(nics)
        yield green(
            CHECK,
            f"{name}: {_speed(min(speeds))} to {_speed(max(speeds))} one way, round trip "
            f"{1e3 * trips[len(trips) // 2]:.2f} ms, {len(mine)} directions",
        )


def _clocks(alive: Sequence[Link]) -> Iterator[Finding]:
    """Name nodes whose clocks differ from that of the lowest node they were measured with."""
    sure = sorted(alive, key=lambda link: (link.target, link.source, link.round_trip_s))
    apart = {link.target: link for link in reversed(sure) if link.source < link.target}
    far = [link for link in apart.values() if _surely_ahead(link) > _CLOCKS_APART_S]
    for link in far:
        level = red if _surely_ahead(link) > _CLOCKS_FAR_APART_S else yellow
        word = "ahead of" if link.clock_ahead_s > 0 else "behind"
        yield level(
            "clocks",
            f"The clock of node {link.target} is {abs(link.clock_ahead_s):.2f} s {word} that of node "
            f"{link.source}",
            remedy="Let chrony or systemd-timesyncd run on both: timedatectl set-ntp true.",
        )
    if apart and not far:
        most = max(abs(link.clock_ahead_s) + link.round_trip_s / 2 for link in apart.values())
        yield green("clocks", f"They agree within {1e3 * most:.1f} ms")


def _surely_ahead(link: Link) -> float:
    return abs(link.clock_ahead_s) - link.round_trip_s / 2


def _mtus(members: Sequence[Member]) -> Iterator[Finding]:
    """Name nodes whose interface has another MTU than most that face it."""
    counts = {len(member.ends) for member in members}
    if len(counts) > 1:
        told = ", ".join(f"{len(member.ends)} on node {member.node}" for member in members)
        yield yellow(
            CHECK,
            f"The nodes have different numbers of interfaces: {told}",
            remedy=f"Collectives use the {min(counts)} that all have; see the lines on interfaces.",
        )
    for mtus in _rails(members):
        usual = max(multimode(mtus.values()))  # of as many, the larger: that is what was meant
        for place, mtu in mtus.items():
            if mtu != usual:
                yield yellow(
                    CHECK,
                    f"{place} has an MTU of {mtu:,}, where others have {usual:,}: TCP copes, RDMA and "
                    "datagrams do not",
                    remedy=f"On node {place.node}: ip link set {place.nic} mtu {usual}",
                )


def _rails(members: Sequence[Member]) -> list[dict[Place, int]]:
    """Return the MTUs of interfaces that face each other."""
    found: dict[str, dict[Place, int]] = {}
    for member in members:
        for index, end in enumerate(member.ends):
            elsewhere = [theirs.network for other in members if other is not member for theirs in other.ends]
            rail = end.network if end.network in elsewhere else str(index)
            found.setdefault(rail, {})[Place(member.node, end.name)] = end.mtu
    return list(found.values())


def _speed(gbit_s: float) -> str:
    """Return a speed in words.

    >>> _speed(0.021), _speed(94.2)
    ('21 Mbit/s', '94.2 Gbit/s')
    """
    return f"{gbit_s:.3g} Gbit/s" if gbit_s >= 1 else f"{1000 * gbit_s:.3g} Mbit/s"
