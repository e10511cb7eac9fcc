"""A TCP store that listens on one address of this machine: torch's own listens on all of them.

The store has no password: who reaches its port can read and write what ranks tell each other.
"""

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # typed there only

from penstock.core.listen import listen_at


def hosted_store(address: str, port: int, *, timeout: timedelta, multi_tenant: bool = False) -> TCPStore:
    """Open a store on this machine.

    Args:
        address: that it listens on, by which other ranks reach it. On all, where it is empty or cannot be
            bound to: one that is translated on the way, or a name that is the loopback only here.
        port: 0: any free one.

    Raises:
        RuntimeError: the port is in use.
    """
    listening = listen_at(address, port)
    if listening is None:
        return TCPStore(
            *(address or "localhost", port, None, True, timeout), False, multi_tenant=multi_tenant
        )
    bound = listening.getsockname()
    return TCPStore(
        *(bound[0], bound[1], None, True, timeout),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listening.detach(),  # the store closes it
    )
