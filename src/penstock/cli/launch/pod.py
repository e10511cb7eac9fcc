"""`penstock launch pod`: run one pod of a run."""

import argparse
import os
import signal
import sys
from pathlib import Path

from penstock.cli.streams import complain, explain
from penstock.cli.training_job import work_of
from penstock.core import env
from penstock.core.config import load_json
from penstock.core.errors import PenstockError
from penstock.launch.job_folder import JobFolder
from penstock.launch.pods.failed import MAX_FAILED, FailedPods
from penstock.launch.render.kubernetes import SPEC_FILE
from penstock.launch.spec import RunSpec
from penstock.launch.supervise import EXIT_NO_PROGRESS, EXIT_UNFIT

EPILOG = """\
Kubernetes runs this command in each pod; the pod's ranks are forked from it and end with it.

example:
  penstock launch pod /etc/penstock

exit codes: 0 finished, 1 failed, 2 wrong recipe or usage, 75 stopped on request, after saving if there was
time, 76 several starts in a row without a new checkpoint, of ranks or of this pod, 77 the node lacks a
folder, a secret or a network of the run
"""

_SCRATCH = Path("/tmp/penstock")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("config", type=Path, metavar="FOLDER", help="folder of spec.json and recipe.toml")


def run(arguments: argparse.Namespace) -> int:
    """Run the pod to its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))  # until there is something to save
    spec = RunSpec.read(load_json(arguments.config / SPEC_FILE))
    from penstock.launch.pods.node import check_pod, is_over, node_of_pod, run_pod, unpack_code

    folder, node, job = JobFolder(Path(spec.run_dir).absolute()), node_of_pod(), env.variable(env.JOB)
    if is_over(folder, job):  # before anything that could fail it
        return 0
    unfit = ""
    try:
        check_pod(spec)  # also sets the secrets needed to list checkpoints
    except PenstockError as error:
        unfit = explain(error)[0]
    pods, code_folder = FailedPods(folder, node), _SCRATCH / "code"
    is_first_exec = str(code_folder) not in sys.path  # below it starts again with it on PYTHONPATH
    if is_first_exec:  # count the pod only once
        failed = pods.begin(job)
        if failed >= MAX_FAILED and (node == 0 or not spec.nodes.is_elastic):  # the others train without it
            cause = f"{failed} pods of node {node} failed in a row without a new checkpoint: given up"
            folder.log_event("finish", node=node, cause=cause, code=EXIT_NO_PROGRESS)
            complain(f"{cause}. {unfit}".rstrip(". "))
            return EXIT_NO_PROGRESS
    if unfit:  # a code of its own: another node may do
        complain(unfit)
        return EXIT_UNFIT
    if unpack_code(spec, code_folder):
        path = os.pathsep.join([str(code_folder), *filter(None, [env.variable("PYTHONPATH")])])
        words = [sys.executable, "-m", "penstock", "launch", "pod", str(arguments.config)]
        os.execve(sys.executable, words, {**env.variables(""), "PYTHONPATH": path})
    try:
        ended = run_pod(spec, folder, work_of(spec), explain, node=node, scratch=_SCRATCH / "logs")
    except PenstockError as error:
        pods.clear_unless_failed(error.exit_code)
        raise
    pods.clear_unless_failed(ended)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # threads of the rendezvous may still be there
