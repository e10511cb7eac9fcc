"""Addresses of remote corpora: parsing and validation before anything is sent.

The address comes from the user; the names of objects come from a manifest, which anyone may have written. So
a name can only lead below the corpus's address, and an address cannot contain a password, because addresses
are logged, stored in a run's state and shown in errors.
"""

import ipaddress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from penstock.core.errors import ConfigError, CorpusError, nearest

SCHEMES = ("az", "gs", "http", "https", "s3")


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a remote folder."""

    scheme: str
    """One of SCHEMES."""
    place: str
    """Bucket, container, or host with port."""
    prefix: str
    """Folder within it, without leading or trailing slashes; may be empty."""

    @property
    def url(self) -> str:
        """The address without a trailing slash."""
        return f"{self.scheme}://{self.place}/{self.prefix}".rstrip("/")

    @property
    def has_listing(self) -> bool:
        """True if the store can list its objects; a web server cannot."""
        return self.scheme not in ("http", "https")

    def url_of(self, name: str) -> str:
        """Return the URL-escaped address of an object."""
        return f"{self.url}/{quote(name)}"


def is_remote(location: str) -> bool:
    """Return True if a corpus's location is an address with a supported scheme.

    >>> is_remote("s3://bucket/web"), is_remote("data/web"), is_remote("megatron:/data/web")
    (True, False, False)
    """
    return location.partition("://")[0] in SCHEMES and "://" in location


def parse(location: str, *, allow_plain_http: bool = False) -> Address:
    """Parse an address.

    Args:
        allow_plain_http: True to allow `http://` to other machines.

    Raises:
        ConfigError: an unknown scheme, a password or a query in it, no bucket or host, or plain http to
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
        # The address is not quoted in the message: the faulty part may be a secret.
        raise ConfigError(
            f"The address of a remote corpus on {parts.hostname} contains a user, a query or a fragment",
            fix="Set credentials in your cloud's environment variables, and give the plain address here.",
        )
    if not parts.netloc:
        raise ConfigError(
            "The address of a remote corpus names no bucket or host",
            got=location,
            fix="Example: s3://bucket/corpus.",
        )
    if scheme == "http" and not allow_plain_http and not _is_this_machine(parts.hostname or ""):
        raise ConfigError(
            "Plain http to another machine can be read and altered on its way",
            got=location,
            fix="Use https, or set PENSTOCK_ALLOW_HTTP=1 if the network is trusted.",
        )
    return Address(scheme, parts.netloc, parts.path.strip("/"))


def check_name(name: str) -> str:
    """Return an object's name after checking that it is a path below its folder.

    Raises:
        CorpusError: it leads elsewhere.
    """
    if not name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise CorpusError(
            "An object's name must be a path below its corpus",
            got=name,
            fix="The manifest is damaged or cannot be trusted.",
        )
    return name


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
