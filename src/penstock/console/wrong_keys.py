"""Wrong keys by client address: after some, ever more time passes until another one counts as an attempt."""

from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network

_FREE = 5
"""Wrong keys before the first wait: people mistype."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 30.0
_FORGOTTEN_S = 600.0
_MAX_ADDRESSES = 10_000
_NETWORK_BITS = 64
"""Leading bits of an IPv6 address that count as one client, which may choose the rest."""


@dataclass(slots=True)
class _Wrong:
    number: int = 0
    last_s: float = 0.0
    until_s: float = 0.0


class WrongKeys:
    """Wrong keys of clients, by address. While a client waits, its wrong keys are not counted.

    Times are seconds of one clock that does not go back. Of more than 10,000 addresses the one whose newest
    wrong key is the oldest is forgotten.

    >>> wrong = WrongKeys()
    >>> for _ in range(7):
    ...     wrong.add("10.0.0.7", now_s=100.0)
    >>> wrong.wait_s("10.0.0.7", now_s=100.5), wrong.wait_s("10.0.0.8", now_s=100.5)
    (1.5, 0.0)
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Wrong] = OrderedDict()

    def wait_s(self, address: str, *, now_s: float) -> float:
        """Return the seconds that this client has to wait; 0: none."""
        known = self._known.get(_client(address))
        return max(0.0, known.until_s - now_s) if known else 0.0

    def add(self, address: str, *, now_s: float) -> None:
        """Count a wrong key."""
        client = _client(address)
        known = self._known.pop(client, None) or _Wrong()
        if now_s - known.last_s > _FORGOTTEN_S:
            known.number = 0
        known.number += 1
        known.last_s = now_s
        if (over := known.number - _FREE) > 0:
            known.until_s = now_s + min(_FIRST_WAIT_S * 2.0 ** min(over - 1, 30), _LONGEST_WAIT_S)
        self._known[client] = known
        if len(self._known) > _MAX_ADDRESSES:
            self._known.popitem(last=False)

    def forget(self, address: str) -> None:
        """Forget a client: its key was right."""
        self._known.pop(_client(address), None)


def _client(address: str) -> str:
    """Return what tells clients apart.

    >>> _client("10.0.0.7"), _client("2001:db8::1"), _client("2001:db8::2"), _client("unix")
    ('10.0.0.7', '2001:db8::/64', '2001:db8::/64', 'unix')
    """
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ip_network((found, _NETWORK_BITS), strict=False))
    return address
