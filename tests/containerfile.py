"""The steps of a Containerfile, run in a fresh Debian root made by debootstrap: for tests without a builder.

Every step runs as root in a root folder of its own, in namespaces for mounts and processes that end with it.
Nothing of this machine is mounted there; files are copied. The network is this machine's.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")


@dataclass
class Stage:
    """A stage: what it starts from, and its instructions."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages_of(text: str) -> list[Stage]:
    """Return the stages of a Containerfile, with the global arguments' defaults filled in."""
    text = re.sub(r"^[ \t]*#.*\n", "", text, flags=re.MULTILINE)
    lines = re.sub(r"\\\n[ \t]*", " ", text).splitlines()
    given, stages = {}, []
    for line in filter(None, map(str.strip, lines)):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found = re.fullmatch(r"(\S+)(?: AS (\w+))?", rest.strip())
            assert found, line
            base = re.sub(r"\$\{(\w+)\}", lambda name: given[name[1]], found[1])
            stages.append(Stage(base, found[2] or ""))
        elif not stages:
            assert word == "ARG", line
            name, _, value = rest.partition("=")
            given[name] = value
        else:
            stages[-1].steps.append((word, rest.strip()))
    return stages


def why_not() -> str:
    """Return why steps cannot be run here; empty: they can."""
    missing = [name for name in ("debootstrap", "unshare", "chroot") if shutil.which(name) is None]
    if missing:
        return f"NO IMAGE WAS BUILT: {', '.join(missing)} not installed"
    return "" if os.geteuid() == 0 else "NO IMAGE WAS BUILT: debootstrap needs root"


@dataclass
class Root:
    """The root folder of a stage, and what its instructions have set."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    work_dir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def run(
        self,
        *words: str,
        user: str = "0:0",
        read_only: bool = False,
        environment: Mapping[str, str] | None = None,
        timeout: float = 1800,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the root.

        Args:
            read_only: only /tmp, /dev/shm and the working folder can be written to, which are empty.
        """
        root, given = str(self.path), {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        mounts = ['mount -t proc proc "$0/proc"', 'mount -t tmpfs -o mode=1777 shm "$0/dev/shm"']
        if read_only:
            mounts += ['mount --bind "$0" "$0"', 'mount -o remount,ro,bind "$0"', 'cd "$0"']
            mounts += ['mount -t proc proc "$PWD/proc"', 'mount -t tmpfs -o mode=1777 shm "$PWD/dev/shm"']
            mounts += [
                f'mount -t tmpfs -o mode=1777 tmp "$PWD{each}"'
                for each in dict.fromkeys(["/tmp", self.work_dir])
            ]
        chroot = shutil.which("chroot")  # the image's PATH has none
        inside = f'cd {shlex.quote(self.work_dir)} && exec "$@"'
        script = " && ".join(
            [
                *mounts,
                f'exec {chroot} --userspec={user} --groups= "$0" /bin/sh -c {shlex.quote(inside)} sh "$@"',
            ]
        )
        (self.path / "dev" / "shm").mkdir(exist_ok=True)
        return subprocess.run(
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
                *("/bin/sh", "-c", script, root, *words),
            ],
            env=given | self.environment | dict(environment or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )


def build(text: str, context: Path, folder: Path) -> Root:
    """Run all steps; return the root of the last stage."""
    debian = folder / "debian"
    _checked(["debootstrap", "--variant=minbase", "bookworm", str(debian), MIRROR])
    roots: dict[str, Root] = {}
    for index, stage in enumerate(stages_of(text)):
        assert "debian:bookworm" in stage.base, f"{stage.base} is not the Debian that is made here"
        root = Root(folder / f"stage-{index}")
        _checked(["cp", "--archive", str(debian), str(root.path)])
        shutil.copy("/etc/resolv.conf", root.path / "etc" / "resolv.conf")
        _let_pip_reach(root)
        for word, rest in stage.steps:
            _apply(root, word, rest, context, roots)
        roots[stage.name] = root
    return root


def _let_pip_reach(root: Root) -> None:
    """Give a root what pip is told of here: local wheels, and the authority that signs its index."""
    _checked(["cp", "/etc/ssl/certs/ca-certificates.crt", str(root.path / "etc" / "host-authorities.crt")])
    root.environment |= {"PIP_CERT": "/etc/host-authorities.crt", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for name in _PIP:
        value = os.environ.get(name, "")
        if value.startswith("/"):
            _checked(["cp", "--recursive", value, str(root.path / "wheels-of-host")])
            value = "/wheels-of-host"
        if value:
            root.environment[name] = value


def _apply(root: Root, word: str, rest: str, context: Path, roots: Mapping[str, Root]) -> None:
    if word == "RUN":
        environment = {"HOME": "/root"} | root.environment
        done = root.run("/bin/sh", "-c", rest, user=root.user, environment=environment)
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    elif word in ("ARG", "ENV"):
        values = dict(setting.split("=", 1) for setting in shlex.split(rest))
        root.environment = values | root.environment if word == "ARG" else root.environment | values
    elif word == "COPY":
        _copy(rest, root, context, roots)
    elif word in ("ENTRYPOINT", "CMD"):
        setattr(root, {"ENTRYPOINT": "entrypoint", "CMD": "command"}[word], json.loads(rest))
    elif word == "WORKDIR":
        root.work_dir = rest
    elif word == "USER":
        root.user = rest
    elif word != "LABEL":
        raise AssertionError(f"this instruction is not known here: {word} {rest}")


def _copy(rest: str, root: Root, context: Path, roots: Mapping[str, Root]) -> None:
    *names, target = rest.split()
    stage = names.pop(0).partition("=")[2] if names[0].startswith("--from=") else ""
    sources = [(roots[stage].path if stage else context) / name.lstrip("/") for name in names]
    to = root.path / target.lstrip("/")
    if target.endswith("/"):
        to.mkdir(parents=True, exist_ok=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if source.is_dir():  # its contents, as COPY does
            to.mkdir(exist_ok=True)
        content = f"{source}/." if source.is_dir() else str(source)
        _checked(["cp", "--recursive", "--preserve=mode,links", content, str(to)])


def _checked(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
