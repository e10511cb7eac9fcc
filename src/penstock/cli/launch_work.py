"""The work of a launched rank: the training command of a specification, ready to be forked."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.cli import training_job
from penstock.core import env
from penstock.launch.job_folder import JobFolder
from penstock.launch.local import check_processes
from penstock.launch.spec import RunSpec


def work_of(spec: RunSpec) -> Callable[[], int]:
    """Return the work of a rank; imports all that it needs, so that forked processes import nothing.

    Sets `env.NODES` for the ranks.

    Raises:
        UsageError: this node has too few cores for its processes.
    """
    verb, *words = spec.command
    parser = argparse.ArgumentParser(prog=f"penstock {verb}")
    training_job.add_arguments(parser)
    arguments = parser.parse_args(words)
    arguments.debug = False
    check_processes(spec.processes, oversubscribe=arguments.oversubscribe)
    env.silence_torch()
    import penstock.train.planning.auto
    import penstock.train.run  # noqa: F401 - torch
    from penstock.parallel.apply import import_sharing

    import_sharing()

    env.set_variables({env.NODES: str(spec.nodes) if spec.nodes.is_elastic else ""})
    return partial(training_job.run_recipe, arguments, tunes=verb == "tune")


def folder_of(run: Path) -> JobFolder:
    """Return the launch files of a run's folder."""
    return JobFolder(run.absolute())
