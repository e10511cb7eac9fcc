"""Render a run as a TrainJob of Kubeflow Trainer v2, and the TrainingRuntime that it refers to.

The runtime holds all of the JobSet that the `jobset` renderer makes. Trainer creates that JobSet under the
TrainJob's name, so host names are the same; its own torchrun is not used, as ranks are started, restarted and
counted by Penstock. Trainer 2.2 and later take the run's progress (obs/sinks/train_job.py).
"""

import math

from penstock.core.network.settings import Setting
from penstock.launch.pod_networks import Attachment
from penstock.launch.pods.pod import PodSpec
from penstock.launch.render.jobset import QUEUE, check_name, jobset_spec
from penstock.launch.render.pod_template import Object, labels_of, object_of
from penstock.launch.spec import RunSpec

_GROUP = "trainer.kubeflow.org"
_API = f"{_GROUP}/v1alpha1"
_STEP = {f"{_GROUP}/trainjob-ancestor-step": "trainer"}
"""Label of the Job that trains: Trainer sets its number of pods."""


def trainjob(spec: RunSpec, pod: PodSpec, attachment: Attachment) -> tuple[Object, Object]:
    """Return the TrainingRuntime and the TrainJob of a run.

    Raises:
        UsageError: the name does not fit.
    """
    check_name(spec)
    name, namespace, labels = spec.name, pod.namespace, labels_of(spec.name)
    template = jobset_spec(spec, pod, attachment, job_labels=_STEP)
    job: Object = {
        "runtimeRef": {"apiGroup": _GROUP, "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": spec.nodes.most},
    }
    if spec.time_limit_s and not spec.max_requeues:
        job["activeDeadlineSeconds"] = math.ceil(spec.time_limit_s)
    runtime = {"mlPolicy": {"numNodes": spec.nodes.most}, "template": {"spec": template}}
    queued = labels | ({QUEUE: spec.queue} if spec.queue else {})
    return (
        object_of(_API, "TrainingRuntime", name, namespace, labels, spec=runtime),
        object_of(_API, "TrainJob", name, namespace, queued, spec=job),
    )


def settings_of_trainjob(spec: RunSpec) -> list[Setting]:
    """Return the settings of a TrainJob, each with its reason."""
    return [
        Setting(
            "TrainingRuntime",
            spec.name,
            "the JobSet of this run only; a cluster's own runtimes start torchrun",
        )
    ]
