"""Addresses of remote corpora: which are understood, and which are refused before anything is sent.

The address comes from the user; the names of objects come from a manifest, which may be anyone's. A name
can therefore only go down from the corpus's address, and an address cannot carry a password, because
addresses are logged, stored in a run's state and shown in errors.
"""

import ipaddress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from penstock.core.errors import ConfigError, CorpusError, nearest

SCHEMES = ("az", "gs", "http", "https", "s3")


@dataclass(frozen=True, slots=True)
class Address:
    """One remote folder."""

    scheme: str
    """One of SCHEMES."""
    place: str
    """Bucket, container, or host with port."""
    prefix: str
    """Folder inside it, without slashes around; may be empty."""

    @property
    def url(self) -> str:
        """The address without a slash at its end."""
        return f"{self.scheme}://{self.place}/{self.prefix}".rstrip("/")

    @property
    def has_listing(self) -> bool:
        """Whether the store can say what it holds; a web server cannot."""
        return self.scheme not in ("http", "https")

    def url_of(self, name: str) -> str:
        """Return the address of an object, escaped."""
        return f"{self.url}/{quote(name)}"


def is_remote(location: str) -> bool:
    """Whether a corpus's location is an address of a scheme that is read here.

    >>> is_remote("s3://bucket/web"), is_remote("data/web"), is_remote("megatron:/data/web")
    (True, False, False)
    """
    return location.partition("://")[0] in SCHEMES and "://" in location


def parse(location: str, *, allow_plain_http: bool = False) -> Address:
    """Take an address apart.

    Args:
        allow_plain_http: whether `http://` may leave this machine.

    Raises:
        ConfigError: another scheme, a password or a query in it, no bucket or host, or plain http to
            another machine.

    >>> parse("s3://bucket/corpora/web/").url
    's3://bucket/corpora/web'
    """
    scheme, separator, _ = location.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ConfigError(
            "A remote corpus has an unknown scheme", got=scheme, fix=nearest(scheme, list(SCHEMES))
        )
    parts = urlsplit(location)
    if parts.username or parts.password or parts.query or parts.fragment:
        # The address is not quoted: what is wrong with it may be a secret.
        raise ConfigError(
            f"The address of a remote corpus on {parts.hostname} holds a user, a query or a fragment",
            fix="Give credentials through the environment of your cloud's tools, and the plain address here.",
        )
    if not parts.netloc:
        raise ConfigError("The address of a remote corpus names no bucket or host", got=location)
    if scheme == "http" and not allow_plain_http and not _is_this_machine(parts.hostname or ""):
        raise ConfigError(
            "Plain http to another machine can be read and altered on the way",
            got=location,
            fix="Use https, or set PENSTOCK_ALLOW_HTTP=1 where the network is trusted.",
        )
    return Address(scheme, parts.netloc, parts.path.strip("/"))


def check_name(name: str) -> str:
    """Return the name of an object, which can only lie below its folder.

    Raises:
        CorpusError: it leads elsewhere.
    """
    if not name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise CorpusError(
            "An object's name must be a path below its corpus",
            got=name,
            fix="The manifest is damaged or not to be trusted.",
        )
    return name


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
