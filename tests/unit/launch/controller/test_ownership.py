"""Which job the operator takes for a run's own."""

from penstock.launch.controller.ownership import job_of


def job(kind, uid, *owners, **meta):
    references = [{"kind": of, "uid": by, "controller": True} for of, by in owners]
    return {"kind": kind, "metadata": {"name": "first", "uid": uid, "ownerReferences": references, **meta}}


OURS = ("TrainingRun", "run")


def test_a_job_that_the_run_owns_is_its_job():
    for jobs in ((job("JobSet", "j", OURS), None), (None, job("TrainJob", "t", OURS))):
        found = job_of("run", *jobs)
        assert found.job in jobs
        assert (found.is_leaving, found.clash) == (False, "")
    assert job_of("run", job("JobSet", "j", OURS, deletionTimestamp="now"), None).is_leaving
    assert job_of("run", None, None).job is None


def test_a_job_of_the_same_name_that_another_made_is_left_alone():
    for jobs in (
        (job("JobSet", "j"), None),
        (job("JobSet", "j", ("TrainingRun", "an earlier run of this name")), None),
        (None, job("TrainJob", "t")),
        (job("JobSet", "j", ("TrainJob", "t")), job("TrainJob", "t")),
    ):
        found = job_of("run", *jobs)
        assert found.job is None
        assert "first exists and is not this run's" in found.clash


def test_a_jobset_that_trainer_made_stands_for_its_trainjob():
    made, trainjob = job("JobSet", "j", ("TrainJob", "t")), job("TrainJob", "t", OURS)
    assert job_of("run", made, trainjob).job is trainjob


def test_a_jobset_whose_trainjob_was_deleted_is_waited_for():
    made = job("JobSet", "j", ("TrainJob", "t"))
    found = job_of("run", made, None)
    assert found.job is made
    assert found.is_leaving
