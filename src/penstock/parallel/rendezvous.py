"""Rendezvous: a store for the ranks of one attempt, separate from those of earlier attempts.

torchrun's agent keeps one store across restarts. Without a namespace per attempt, a rank reads the address
that its peer wrote before it was killed, and the connection is refused. torchrun's restart count cannot name
the attempt: each agent has its own, and a node that only rejoins because another node's rank failed does not
increase it. So ranks agree through the store itself:

    rank r   first increments its arrival counter: this process is arrival n of rank r
    rank 0   names the attempt after its own arrival, and writes the name for the newest arrival of every
             rank, again for one that arrives later, until each has answered
    rank r   waits for the name written for arrival n of rank r, and answers

Only process n reads what is written for n. This holds if a supervisor stops all ranks before it restarts
them, as torchrun does: otherwise a waiting rank 0 would include a newly started rank in its own attempt.

Penstock's own launcher makes a new file for each attempt: its ranks need not agree.
"""

from datetime import timedelta

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore  # typed there only

from penstock.core import clock
from penstock.core.env import Ranks, meeting, rendezvous
from penstock.core.errors import PenstockError, UsageError
from penstock.parallel.hosted_store import hosted_store

_POLL_S = 0.2  # polling interval of rank 0


def open_store(who: Ranks, *, timeout_s: float) -> Store:
    """Return the store named by the launcher's environment; rank 0 hosts it, unless torchrun's agent does.

    Raises:
        UsageError: several ranks, and no rendezvous address.
        PenstockError: the store does not answer.
    """
    where = rendezvous()
    if who.world_size == 1:
        return HashStore()
    if where.startswith("file://"):
        return FileStore(where.removeprefix("file://"), who.world_size)
    address = meeting()
    if address is None:
        raise UsageError(
            f"{who.world_size} ranks, and no MASTER_ADDR and MASTER_PORT for their rendezvous",
            fix="Start them with torchrun, or on one machine with --processes.",
        )
    keeps, wait = who.rank == 0 and not address.is_kept, timedelta(seconds=timeout_s)
    try:
        if keeps:
            return hosted_store(address.address, address.port, timeout=wait, multi_tenant=True)
        return TCPStore(
            address.address, address.port, None, False, wait, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError) as error:
        if keeps:
            raise PenstockError(
                f"Rank 0 cannot open the store of the run at {address.address}:{address.port}",
                got=first_line(error),
                fix="Check that MASTER_ADDR is this machine and that no other run uses MASTER_PORT.",
            ) from None
        raise PenstockError(
            f"Rank {who.rank} does not reach the first rank at {address.address}:{address.port} "
            f"within {timeout_s:.0f} s",
            fix="Check that rank 0 runs, the route to that address, and the firewall for that port.",
        ) from None


def meet(store: Store, who: Ranks, *, timeout_s: float) -> Store:
    """Return the part of the store that belongs to this attempt, once all its ranks have joined.

    Args:
        store: may contain entries of earlier attempts. A file has none: its ranks do not wait here.

    Raises:
        PenstockError: a rank did not join, or the store is gone.
    """
    if isinstance(store, FileStore):
        return store
    shared = PrefixStore("penstock", store)
    try:
        arrival = shared.add(f"arrivals/{who.rank}", 1)
        agree = _call if who.rank == 0 else _answer
        name = agree(shared, who, arrival, timeout_s)
    except RuntimeError as error:  # raised by stores
        raise PenstockError(
            f"Rank {who.rank} of {who.world_size} lost the rendezvous store",
            got=first_line(error),
            fix="See the messages of the first rank, and of torchrun on its machine.",
        ) from None
    return PrefixStore(name, store)


def _call(store: Store, who: Ranks, arrival: int, timeout_s: float) -> str:
    """Name the attempt and announce it to every rank until all have answered: rank 0's part."""
    name, deadline = f"attempt-{arrival}", clock.monotonic() + timeout_s
    told, awaited = dict.fromkeys(range(1, who.world_size), 0), [*range(1, who.world_size)]
    while awaited:
        for rank in awaited:
            newest = store.add(f"arrivals/{rank}", 0)
            if newest > told[rank]:
                store.set(f"attempts/{rank}/{newest}", name)
                told[rank] = newest
        _comes(store, [f"{name}/{rank}" for rank in awaited], _POLL_S)
        awaited = [rank for rank in awaited if not store.check([f"{name}/{rank}"])]
        if awaited and clock.monotonic() > deadline:
            raise PenstockError(
                f"{len(awaited)} of {who.world_size} ranks did not join within {timeout_s:.0f} s",
                got=awaited[:16],
                fix="See their messages, and whether their machines reach MASTER_ADDR.",
            )
    return name


def _answer(store: Store, who: Ranks, arrival: int, timeout_s: float) -> str:
    """Wait for the name of the attempt, and answer: the part of the other ranks."""
    key = f"attempts/{who.rank}/{arrival}"
    if not _comes(store, [key], timeout_s):
        raise PenstockError(
            f"Rank {who.rank} of {who.world_size} had no answer from the first rank in {timeout_s:.0f} s",
            fix="See the messages of rank 0.",
        )
    name: str = store.get(key).decode()
    store.set(f"{name}/{who.rank}", "here")
    return name


def _comes(store: Store, keys: list[str], timeout_s: float) -> bool:
    """Wait for keys; return False at the timeout.

    Raises:
        RuntimeError: the store is gone.
    """
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
        return True
    except RuntimeError:
        return store.check(keys)


def first_line(error: BaseException) -> str:
    """Return the first line of torch's message, without its C++ stack."""
    return (str(error).splitlines() or [type(error).__name__])[0]
