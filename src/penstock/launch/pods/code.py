"""Source code for pods without an image build: a folder as an archive, by content hash.

Up to 1 MiB travels in a ConfigMap, more in an object store. The archive of a folder is always the same bytes,
so that a folder that has not changed is neither uploaded nor unpacked again.
"""

import base64
import gzip
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

from penstock.checkpoint.remote_storage import RemotePlace
from penstock.core.errors import PenstockError, UsageError
from penstock.core.units import mib
from penstock.launch.pods.pod import PodCode
from penstock.launch.render.pod_template import CODE_FILE, code_name, labels_of, object_of

CONFIG_MAP_BYTES = 2**20
"""Most bytes of a ConfigMap, by the API server's check."""
_HEADROOM = 4096
_SKIPPED = ("__pycache__", "node_modules", "build", "dist", "runs")
_MAX_BYTES = 2**28


def packed(folder: Path) -> bytes:
    """Return the files of a folder as tar.gz, without hidden ones, caches and build products.

    Raises:
        UsageError: it is no folder, holds no file, or far more than source code.
    """
    if not folder.is_dir():
        raise UsageError("--code takes a folder", got=str(folder), fix="Give the folder of your sources.")
    buffer = io.BytesIO()
    total = 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in _files(folder):
            content = path.read_bytes()
            total += len(content)
            if total > _MAX_BYTES:
                raise UsageError(
                    f"The folder of --code holds more than {mib(_MAX_BYTES)}",
                    got=str(folder),
                    fix="Give the folder of the sources alone; data and weights belong in a volume.",
                )
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size, entry.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(content))
    if not total:
        raise UsageError(
            "The folder of --code holds no files", got=str(folder), fix="Give the folder of your sources."
        )
    return gzip.compress(buffer.getvalue(), mtime=0)


def _files(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _SKIPPED or path.name.endswith((".egg-info", ".pyc")):
            continue
        if path.is_dir() and not path.is_symlink():
            found += _files(path)
        elif path.is_file():
            found.append(path)
    return found


def code_of(archive: bytes, *, store: str) -> PodCode:
    """Return the description of an archive.

    Args:
        store: address of an object store for archives that a ConfigMap does not hold.

    Raises:
        UsageError: it is too large, and there is no store.
    """
    digest = hashlib.sha256(archive).hexdigest()
    if len(archive) <= CONFIG_MAP_BYTES - _HEADROOM:
        return PodCode(sha256=digest)
    if not store:
        raise UsageError(
            "The code is too large for a ConfigMap, which holds 1 MiB",
            got=mib(len(archive)),
            fix="Give an object store: --code-store s3://bucket/prefix; or a smaller folder.",
        )
    return PodCode(sha256=digest, address=store)


def code_config_map(archive: bytes, code: PodCode, namespace: str) -> dict[str, Any]:  # Any: JSON
    """Return the ConfigMap of an archive; it is immutable, and shared by runs with the same code."""
    labels = {name: text for name, text in labels_of("").items() if text}
    data = {CODE_FILE: base64.b64encode(archive).decode()}
    name = code_name(code.sha256)
    return object_of("v1", "ConfigMap", name, namespace, labels, immutable=True, binaryData=data)


def upload(archive: bytes, code: PodCode) -> None:
    """Write an archive to its object store."""
    RemotePlace(code.address).write("code", _file(code), [memoryview(archive)])


def fetched(code: PodCode, mounted: Path) -> bytes:
    """Return the archive in a pod.

    Args:
        mounted: folder of the ConfigMap.

    Raises:
        PenstockError: it is missing, or is not the one that was submitted.
    """
    try:
        if code.address:
            place = RemotePlace(code.address)
            archive = bytes(place.read("code", _file(code), 0, place.size("code", _file(code))))
        else:
            archive = (mounted / CODE_FILE).read_bytes()
    except OSError as error:
        raise PenstockError(
            f"The code of the run is missing: {error}", fix="Launch the run again with --code."
        ) from None
    if (found := hashlib.sha256(archive).hexdigest()) != code.sha256:
        raise PenstockError(
            f"The code has the hash {found[:16]}, and {code.sha256[:16]} was submitted",
            fix="Launch the run again with --code.",
        )
    return archive


def unpack(archive: bytes, folder: Path) -> None:
    """Write the files of an archive into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        files.extractall(folder, filter="data")


def _file(code: PodCode) -> str:
    return f"{code.sha256}.tar.gz"
