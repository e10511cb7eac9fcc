"""Network namespaces without names: they last as long as somebody holds them, and no longer.

A namespace made here is held by a file descriptor of this process and by the processes inside it. When they
end, however they end, SIGKILL included, the kernel takes the namespace apart with all that is in it; there is
nothing to sweep. Only the calling thread is ever moved, so other threads of the process notice nothing.
"""

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.errors import UsageError

_NEW_NETWORK, _NEW_MOUNTS, _NEW_HOST_NAME = 0x4000_0000, 0x0002_0000, 0x0400_0000
_PRIVATE, _RECURSIVE, _BIND = 1 << 18, 1 << 14, 1 << 12
_OWN = "/proc/thread-self/ns/net"


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 where it succeeds."""
    library = ctypes.CDLL(None, use_errno=True)  # os.setns and os.unshare come with Python 3.12
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _own() -> int:
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def new_namespace() -> int:
    """Make an empty network namespace; return a descriptor that holds it, for the caller to close.

    Raises:
        UsageError: this process may not.
    """
    try:
        home = _own()
    except OSError:
        raise UsageError("Emulated hosts need the namespaces of Linux, 3.17 or newer") from None
    try:
        _call("unshare", _NEW_NETWORK)
        try:
            return _own()
        finally:
            _call("setns", home, _NEW_NETWORK)
    except PermissionError:
        raise UsageError(
            "This process may not make network namespaces, which emulated hosts are",
            fix="Run it as root (in a container: with CAP_SYS_ADMIN and CAP_NET_ADMIN), "
            "or as `unshare --map-root-user --net penstock ...`.",
        ) from None
    finally:
        os.close(home)


@contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Let the calling thread, and processes it starts, see the network of a namespace."""
    home = _own()
    try:
        _call("setns", namespace, _NEW_NETWORK)
        try:
            yield
        finally:
            _call("setns", home, _NEW_NETWORK)
    finally:
        os.close(home)


def settle(namespace: int, *, host_name: str, names: str) -> None:
    """Move this process into a namespace for good, with a host's name and files that fit it.

    Args:
        names: what /etc/hosts says there.

    Raises:
        UsageError: this process may not.
    """
    try:
        _call("setns", namespace, _NEW_NETWORK)
        _call("unshare", _NEW_MOUNTS | _NEW_HOST_NAME)
        _call("mount", None, b"/", None, _PRIVATE | _RECURSIVE, None)
        _mount_files({"hosts": names, "resolv.conf": ""})
        _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)  # /sys/class/net is that of who mounted it
        socket.sethostname(host_name)
    except PermissionError as error:
        raise UsageError(
            f"This process may not enter an emulated host ({error.strerror})",
            fix="Run it as root, in a container with CAP_SYS_ADMIN and no profile that forbids mounts.",
        ) from None


def _mount_files(texts: dict[str, str]) -> None:
    """Let this process see other files in /etc; nobody else does, and nothing of them stays.

    Without them a rank waits seconds for the name of its peer, from a name server that is out of reach.
    """
    _call("mount", b"tmpfs", b"/sys", b"tmpfs", 0, None)  # a place for them; the new /sys comes to lie on it
    for name, text in texts.items():
        shown = Path("/etc") / name
        if shown.exists():
            (Path("/sys") / name).write_text(text)
            _call("mount", b"/sys/" + name.encode(), str(shown).encode(), None, _BIND, None)
