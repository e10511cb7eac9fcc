"""Render a run for Slurm: one batch script, which supervises, maps exit codes and requeues itself.

Traps that the script avoids, seen with Slurm 22.05:

- A pre-empted job that ends in its grace time is FAILED and not requeued: the script asks `scontrol requeue`.
- A signal of `--signal=B:` reaches the script only: it hands it to the supervisor.
- bash runs a trap only after the foreground command: the supervisor runs in the background.
"""

import re
import shlex
from pathlib import PurePosixPath

from penstock.core.errors import UsageError
from penstock.core.network.settings import Setting
from penstock.core.units import plural
from penstock.launch.nodes.attempt import BASE_PORT, NUM_PORTS
from penstock.launch.preflight import EXCLUDE, REPORT, REPORT_JSON, command_of
from penstock.launch.render.common_settings import settings_of_run
from penstock.launch.render.rendered import Rendered
from penstock.launch.spec import RunSpec
from penstock.launch.supervise import EXIT_NO_PROGRESS

SCRIPT, OUTPUT, SETUP = "job.sbatch", "slurm.out", "setup.sh"
_SHARES = r"(-c|--cpus-|--exclusive|--oversubscribe|-s|--cores-per)"
"""Extras that say what of a node the job takes; without one it takes whole nodes."""
_TRIES, _TRY_AGAIN_S = 30, 10
"""How often, and after how many seconds, a controller that does not answer is asked again."""


def render(spec: RunSpec) -> Rendered:
    """Return the batch script, and the command that submits it.

    Raises:
        UsageError: a path or name cannot stand in a line of options.
    """
    _check(spec)
    path = f"{spec.run_dir}/launch/{SCRIPT}"
    script = "\n".join([*_head(spec), "", *_body(spec)]) + "\n"
    setup = {f"{spec.run_dir}/launch/{SETUP}": f"{spec.setup.rstrip()}\n"} if spec.setup else {}
    return Rendered(
        files={**setup, path: script},
        commands=(("sbatch", "--parsable", path),),
        settings=(*settings_of_run(spec), *_settings(spec)),
    )


def time_text(seconds: float) -> str:
    """Return a time limit in Slurm's form, rounded up to seconds.

    >>> time_text(90061)
    '1-01:01:01'
    """
    whole = int(-(-seconds // 1))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    return f"{days}-{hours:02d}:{rest // 60:02d}:{rest % 60:02d}"


def _check(spec: RunSpec) -> None:
    """Refuse what sbatch or bash would read as more than a path or a name.

    Raises:
        UsageError: with it.
    """
    for what, path in (("run.dir", spec.run_dir), ("the working folder", spec.work_dir)):
        if not path.isprintable() or '"' in path or "\\" in path:
            raise UsageError(
                f"The path of {what} has a character that an #SBATCH line cannot hold",
                got=path,
                fix="Leave out line ends, control characters, double quotes and backslashes.",
            )
    for option, name in (("partition", spec.queue), ("account", spec.account)):
        if not re.fullmatch(r"[\w.,:@+-]*", name):
            raise UsageError(f"--{option} takes a name", got=name, fix="Letters, digits and . , : @ + - _.")


def _head(spec: RunSpec) -> list[str]:
    """Return the head of the script: its own options, and those that were handed through."""
    nodes = spec.nodes
    options = [
        f"--job-name={spec.name}",
        f"--nodes={nodes.least}-{nodes.most}" if nodes.is_elastic else f"--nodes={nodes.most}",
        "--requeue",
        f"--signal=B:USR1@{round(spec.grace_s)}",
    ]
    if nodes.is_elastic:
        options.append("--no-kill")
    output = _word(f"{spec.run_dir}/launch/{OUTPUT}")
    options = [*options, "--open-mode=append", f"--output={output}"]
    if spec.queue:
        options.append(f"--partition={spec.queue}")
    if spec.account:
        options.append(f"--account={spec.account}")
    if not any(re.match(_SHARES, extra) for extra in spec.extras):
        options.append("--exclusive")
    if spec.time_limit_s:
        options.append(f"--time={time_text(spec.time_limit_s)}")
    return ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*options, *spec.extras])]


def _word(path: str) -> str:
    """Return a path as sbatch reads it in a line of options.

    >>> _word("/runs/100%"), _word("/my runs/a")
    ('/runs/100%%', '"/my runs/a"')
    """
    path = path.replace("%", "%%")  # sbatch writes the job's number for %j
    return path if re.fullmatch(r"[\w./%+@:,=-]+", path) else f'"{path}"'


def _body(spec: RunSpec) -> list[str]:
    python, run = shlex.quote(spec.python), shlex.quote(spec.run_dir)
    lines = [
        "# USR1 comes before the time limit, TERM when the job is pre-empted or cancelled: save, and stop.",
        "woken= pid=",
        'trap \'woken=1; [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null\' USR1 TERM',
        f"cd {shlex.quote(spec.work_dir)} || exit 1",
        *(f"export {name}={shlex.quote(value)}" for name, value in spec.environment),
        *_setup_function(spec),
        "starts=${SLURM_RESTART_COUNT:-0}",
        "# Slurm itself requeues a job whose first node is lost.",
        f'if [ "$starts" -gt {spec.max_requeues} ]; then',
        *_out_of_requeues(spec),
        "fi",
    ]
    if spec.doctor != "skip":
        lines += ["", *_doctor(spec)]
    return [
        *lines,
        "",
        "code=75",
        'if [ -z "$woken" ]; then',
        f"  {_setup_prefix(spec)}{python} -m penstock launch supervise {run} &",
        "  pid=$!",
        '  [ -z "$woken" ] || kill -TERM "$pid" 2>/dev/null # it came before the number was known',
        "  while :; do",
        '    wait "$pid"; code=$?',
        '    if [ "$code" -le 128 ] || [ -z "$woken" ]; then break; fi',
        "    woken=",
        "  done",
        "fi",
        "",
        "case $code in",
        "  75) # stopped after saving: back into the queue, unless a stop for good was requested",
        f"    if [ -e {run}/launch/stop ]; then exit 0; fi",
        f'    if [ "$starts" -ge {spec.max_requeues} ]; then',
        *(f"    {line}" for line in _out_of_requeues(spec)),
        "    fi",
        "    # After scancel the job is no longer RUNNING, and must stay away. Slurm may not answer at once.",
        f"    for try in $(seq {_TRIES}); do",
        '      state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)',
        '      if [ "$state" = RUNNING ]; then',
        '        scontrol requeue "$SLURM_JOB_ID" && sleep 120 # until the job is killed to be requeued',
        '      elif [ -n "$state" ]; then',
        "        break",
        "      fi",
        f"      sleep {_TRY_AGAIN_S}",
        "    done",
        "    exit 75 ;;",
        f"  {EXIT_NO_PROGRESS}) exit {EXIT_NO_PROGRESS} ;; # no progress: requeuing would repeat it",
        "  *) exit $code ;;",
        "esac",
    ]


def _setup_prefix(spec: RunSpec) -> str:
    return "prepared " if spec.setup or spec.wrapper else ""


def _setup_function(spec: RunSpec) -> list[str]:
    """Return the function by which a shell of its own becomes a command, once it has read the setup.

    The setup may set traps and options, or exit, and changes nothing of the script's own shell.
    """
    setup = [
        "  trap 'trap - EXIT; exit 75' TERM # nothing trains yet: back into the queue",
        f"  trap 'echo \"launch/{SETUP} ended with exit code $?, so nothing was started\" >&2; exit 1' EXIT",
        f"  source {shlex.quote(f'{spec.run_dir}/launch/{SETUP}')}",
        '  code=$?; [ "$code" -eq 0 ] || exit "$code"',
        "  trap - TERM EXIT",
    ]
    own = shlex.quote(str(PurePosixPath(spec.python).parent))
    path = [f'  export PATH={own}:"$PATH" # python3 of a wrapper that is no container']
    if not _setup_prefix(spec):
        return []
    return [
        "prepared() {",
        *(setup if spec.setup else []),
        *(path if spec.wrapper else []),
        '  exec "$@"',
        "}",
    ]


def _out_of_requeues(spec: RunSpec) -> list[str]:
    return [
        f'  echo "requeued $starts times; the bound is {spec.max_requeues} (--max-requeues)" >&2',
        "  exit 75",
    ]


def _doctor(spec: RunSpec) -> list[str]:
    report, as_json, exclude = (
        shlex.quote(f"{spec.run_dir}/launch/{name}") for name in (REPORT, REPORT_JSON, EXCLUDE)
    )
    open_, close = (f"( {_setup_prefix(spec)}", " )") if _setup_prefix(spec) else ("", "")
    ends = [
        '  if [ "$examined" -ne 0 ] && [ -z "$woken" ]; then',
        '    echo "not started: the run asks for sound nodes (--doctor require)" >&2',
        "    exit 1",
        "  fi",
    ]
    return [
        f"# Examine the nodes before the first start; the report is launch/{REPORT}.",
        'if [ "$starts" -eq 0 ]; then',
        f"  rm -f {exclude} {as_json} # of an earlier job",
        f"  export DOCTOR_PORT=$(({BASE_PORT} + (SLURM_JOB_ID * 7 + 9973) % {NUM_PORTS}))",
        f'  {open_}srun --ntasks-per-node=1 --ntasks="$SLURM_NNODES" --kill-on-bad-exit=0 --cpu-bind=none '
        "bash -c 'export RANK=$SLURM_PROCID "
        "WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "
        "MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR MASTER_PORT=$DOCTOR_PORT PENSTOCK_NODE=$SLURMD_NODENAME; "
        f'exec "$@"\' doctor {shlex.join([*spec.node_python, *command_of(spec)])}{close} > {report} 2>&1',
        "  examined=$?",
        f'  [ "$examined" -eq 0 ] || echo "penstock doctor: exit code $examined, see "{report} >&2',
        f'  [ ! -s {exclude} ] || echo "leave out what it found bad: --sbatch=--exclude="{exclude} >&2',
        *(ends if spec.doctor == "require" else []),
        "fi",
    ]


def _settings(spec: RunSpec) -> list[Setting]:
    found = [
        Setting(
            "--signal",
            f"B:USR1@{round(spec.grace_s)}",
            "the grace: sent so many seconds before the time limit, to the script",
        ),
        Setting(
            "--requeue",
            f"at most {spec.max_requeues} by itself",
            "pre-emption, the time limit and a lost node put the job back; progress bounds it too",
        ),
        Setting(
            "--exclusive",
            "unless --sbatch says what of a node to take",
            "Slurm's default is one core of a node",
        ),
        Setting("--open-mode", "append", "a requeued job keeps what it printed before"),
        Setting(
            "srun --ntasks-per-node",
            "1",
            "one process on each node starts the others, whatever SLURM_NTASKS says; as an "
            "option of the job, it would get the fewest nodes of a range",
        ),
    ]
    if spec.nodes.is_elastic:
        reason = "a lost node shrinks the run instead of ending it"
        found.append(Setting("--no-kill", "", reason))
    if spec.doctor != "skip":
        found.append(Setting("doctor", spec.doctor, "`penstock doctor` as a first srun, once"))
    if spec.setup:
        reason = (
            "--setup, read by the first node for the doctor and for the supervisor; all get its variables"
        )
        found.append(Setting(SETUP, plural(len(spec.setup.splitlines()), "line"), reason))
    if spec.wrapper:
        reason = (
            "--wrapper of each node's command, which runs the python3 in it; the supervisor stays outside"
        )
        found.append(Setting("wrapper", shlex.join(spec.wrapper), reason))
    found += [Setting(extra, "", "passed on") for extra in spec.extras]
    return found
