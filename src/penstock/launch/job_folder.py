"""Files of a launched run, in RUN/launch: specification, job, transitions, logs, requests; no torch.

spec.json           the RunSpec
job.json            engine, its name for the job, where and when it was submitted
supervisor.json     state of the supervisor, kept across requeues
events.jsonl        transitions, each with its cause: one line, appended by any node
request.json        number of nodes that was asked for while the run goes on
stop                the job that was asked to stop for good, with an id on Kubernetes: it is not started again
started.json        the pods' job that started last, on Kubernetes
finished.json       the pods' job that ran the last step, on Kubernetes
logs/rank-00000.log what the process of a rank printed, all its starts one below the other
pods/               count of failed pods of each node, on Kubernetes (failed_pods.py)
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from penstock.checkpoint.find import saved_of
from penstock.checkpoint.layout import step_of
from penstock.core import clock
from penstock.core import config as configs
from penstock.core.errors import PenstockError, UsageError
from penstock.core.files import exclusive, is_locked, locked_at, write_json
from penstock.core.log import EventLog
from penstock.launch.known_runs import remember
from penstock.launch.spec import RunSpec
from penstock.launch.supervise import SupervisorState
from penstock.obs.metric_names import METRICS_FILE

log = EventLog(__name__)

T = TypeVar("T")
LAUNCH_FOLDER = "launch"
_TAIL_BYTES = 256 << 10
_RECIPE = "config.json"
"""File of a run that was started: without it there are no checkpoints to look for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job, as its engine knows it."""

    engine: str
    ident: str
    """Job id of Slurm; process id of the local launcher."""
    host: str
    submitted_at: str


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Access to the files of a launched run."""

    run: Path
    """Folder of the run."""

    @property
    def path(self) -> Path:
        """Folder of the launch files."""
        return self.run / LAUNCH_FOLDER

    def make(self) -> None:
        """Make the folders."""
        (self.path / "logs").mkdir(parents=True, exist_ok=True)

    def log_of(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def ranks_with_logs(self) -> list[int]:
        """Return the ranks that have printed something, in order."""
        names = (self.path / "logs").glob("rank-*.log")
        return sorted(int(path.stem.removeprefix("rank-")) for path in names)

    def write_spec(self, spec: RunSpec) -> None:
        """Write the specification."""
        write_json(self.path / "spec.json", spec.as_json())

    def spec(self) -> RunSpec:
        """Read the specification.

        Raises:
            UsageError: the run was not launched, or the file is damaged.
        """
        return self._read("spec.json", RunSpec.read)

    def write_job(self, job: Job) -> None:
        """Write the engine's name for the job; `penstock launch list` knows the run from then on."""
        write_json(self.path / "job.json", asdict(job))
        remember(self.run.absolute())

    def job(self) -> Job:
        """Read the engine's name for the job.

        Raises:
            UsageError: the run was not launched, or the file is damaged.
        """
        return self._read("job.json", partial(configs.build, Job))

    def has_job(self) -> bool:
        """True if the run was launched before."""
        return (self.path / "job.json").is_file()

    def _read(self, name: str, build: Callable[[configs.Raw], T]) -> T:
        if not (self.path / name).is_file():
            raise UsageError(
                f"{self.run} was not started by `penstock launch`",
                fix="Give the folder of the run: run.dir of its recipe.",
            )
        try:
            return build(configs.load_json(self.path / name))
        except UsageError as error:  # whose remedy is for a recipe
            raise UsageError(
                f"{self.path / name} is damaged, or of another version of Penstock",
                fix=f"Once no job of the run is left, remove {self.path}, and launch the run again: it "
                "continues from its newest checkpoint.",
            ) from error

    def supervisor(self) -> SupervisorState:
        """Return the counts of an earlier start of this job; a new state if there was none."""
        try:
            kept = json.loads((self.path / "supervisor.json").read_text())
            return SupervisorState(idle=int(kept["idle"]), newest=int(kept["newest"]))
        except (OSError, ValueError, KeyError, TypeError):
            return SupervisorState()

    def write_supervisor(self, state: SupervisorState) -> None:
        """Keep the counts of a supervisor for its next start; a full disk, which stops none, is a warning."""
        try:
            write_json(self.path / "supervisor.json", {"idle": state.idle, "newest": state.newest})
        except OSError as error:
            log.warning(
                "counts_unwritten", "The counts of starts were not written: {error}", error=error.strerror
            )

    def mark_started(self, job: str) -> None:
        """Note that the pods of a job start."""
        self._note_job("started.json", job)

    def started_job(self) -> str:
        """Return the job whose pods started last; empty: none."""
        return self._job_in("started.json")

    def mark_finished(self, job: str) -> None:
        """Note that a job has run the last step."""
        self._note_job("finished.json", job)

    def finished_job(self) -> str:
        """Return the job that has run the last step; empty: none."""
        return self._job_in("finished.json")

    def _note_job(self, name: str, job: str) -> None:
        """Write a job into a file that all nodes may write at once, so each under a draft of its own."""
        draft = self.path / f"{name}.{secrets.token_hex(8)}"
        write_json(draft, {"job": job})
        draft.replace(self.path / name)

    def _job_in(self, name: str) -> str:
        try:
            return str(json.loads((self.path / name).read_text())["job"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def mark_examined(self, job: str) -> None:
        """Note that the nodes of a job were examined."""
        self._note_job("examined.json", job)

    def examined_job(self) -> str:
        """Return the job whose nodes were examined; empty: none."""
        return self._job_in("examined.json")

    def forget(self) -> None:
        """Remove what an earlier job of this run left: its counts and requests; its events and logs stay."""
        jobs = ("started.json", "finished.json", "examined.json")
        for name in ("supervisor.json", "request.json", "stop", *jobs):
            (self.path / name).unlink(missing_ok=True)

    def ask_for_nodes(self, num_nodes: int) -> None:
        """Ask for another number of nodes."""
        write_json(self.path / "request.json", {"nodes": num_nodes})

    def take_request(self) -> int:
        """Return the number of nodes that was asked for since the last call; 0: none."""
        path = self.path / "request.json"
        try:
            asked = int(json.loads(path.read_text())["nodes"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        path.unlink(missing_ok=True)
        return asked

    def ask_to_stop(self, job: str = "") -> None:
        """Mark a job of the run as one that is to stop for good.

        Args:
            job: its id on Kubernetes, where the next job of the run is submitted elsewhere; empty: any.
        """
        write_json(self.path / "stop", {"job": job})

    def is_to_stop(self, job: str = "") -> bool:
        """True if a job of the run was asked to stop for good."""
        return (self.path / "stop").exists() and self._job_in("stop") == job

    def log_event(self, event: str, **values: Any) -> None:  # Any: JSON values
        """Append one transition; nodes that share the folder append whole lines.

        A full disk stops no supervisor: what cannot be written is a warning; a cut line is ended first.
        """
        line = json.dumps({"time": clock.utc_now(), "event": event, **values}, ensure_ascii=False) + "\n"
        try:
            descriptor = os.open(self.path / "events.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, b"\n" * is_cut + line.encode(errors="backslashreplace"))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning(
                "transition_unwritten",
                "A transition was not written: {error}; it is {transition}",
                error=error.strerror,
                transition=line.rstrip(),
            )

    def events(self) -> list[dict[str, Any]]:  # Any: JSON values
        """Return the transitions, oldest first."""
        try:
            text = (self.path / "events.jsonl").read_text(
                encoding="utf-8", errors="replace"
            )  # one may be cut
        except OSError:
            return []
        found = (_object(line) or {} for line in text.split("\n"))
        return [event for event in found if "time" in event and isinstance(event.get("event"), str)]

    def bytes_of_events(self) -> int:
        """Return the size of the file of transitions: another one, if there are new ones."""
        try:
            return (self.path / "events.jsonl").stat().st_size
        except OSError:
            return 0

    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint; -1: there is none, or it cannot be read."""
        newest = self.newest_known()
        return -1 if newest is None else newest

    def newest_known(self) -> int | None:
        """Return the step of the newest complete checkpoint; -1: there is none; None: it cannot be read."""
        try:
            if not (self.run / _RECIPE).is_file():
                return -1
            names = [saved.name for saved in saved_of(self.run)]
        except (PenstockError, OSError):
            return None
        return max((step_of(name) or 0 for name in names), default=-1)

    def progress(self) -> dict[str, Any]:  # Any: JSON values
        """Return step, loss and tokens_per_s of the newest step, and checkpoint; None where there is none."""
        last, newest = self.last_record(), self.newest_step()
        found = {name: last.get(name) for name in ("step", "loss", "tokens_per_s")}
        return {**found, "checkpoint": newest if newest >= 0 else None}

    def last_record(self) -> dict[str, Any]:  # Any: JSON values
        """Return the newest record of a step; {} if the run's metrics have none."""
        return _last_record(self.run / METRICS_FILE)

    def end(self) -> dict[str, Any] | None:  # Any: JSON values
        """Return the transition by which the newest job ended; None: there is none."""
        end = None
        for event in self.events():
            if event["event"] == "submitted":
                end = None
            elif event["event"] == "finish" and "node" not in event:
                end = event
        return end

    def held(self) -> AbstractContextManager[None]:
        """Hold the job's lock: one launcher for a run.

        Raises:
            RunLocked: another launcher holds it.
        """
        return exclusive(self.path, purpose="penstock launch")

    def is_held(self) -> bool:
        """True if a launcher holds the lock."""
        return is_locked(self.path)

    def is_trained(self) -> bool:
        """True if processes train the run: they see requests by themselves."""
        return is_locked(self.run)

    def trained_at(self) -> int:
        """Return when processes last began to train the run, as a number that grows; 0: none has."""
        return locked_at(self.run)


def _last_record(path: Path) -> dict[str, Any]:  # Any: JSON values
    """Return the newest record of a step in a file of metrics; {} if its end has none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return {}
    records = (_object(line) or {} for line in reversed(lines))
    return next((record for record in records if "loss" in record and "tokens_per_s" in record), {})


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # cut by a power failure, or of another program
        return None
    return found if isinstance(found, dict) else None


def line_of(event: Mapping[str, Any]) -> str:
    """Return a transition as one line for people.

    >>> line_of({"time": "2026-01-01T00:00:00+00:00", "event": "start", "node": 1, "cause": "first start"})
    '2026-01-01T00:00:00+00:00  start        node 1: first start'
    """
    who = f"node {event['node']}" if "node" in event else ""
    shown = [f"{k}={v}" for k, v in event.items() if k not in ("time", "event", "node", "cause") and v != ""]
    said = " ".join([str(event.get("cause") or ""), *shown]).strip()
    return f"{event['time']}  {event['event']:<11}  {f'{who}: ' if who else ''}{said}"
