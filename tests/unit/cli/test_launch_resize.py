"""Sizes of a launched run: what a resize checks, and what the ranks are told of those that are possible."""

import os

import pytest
from tests.launched import write_recipe
from tests.unit.launch.test_spec import make_spec

from penstock.cli.main import main
from penstock.cli.training_job import work_of
from penstock.core import env
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.spec import node_range
from penstock.testing.corpora import write_corpus
from penstock.train.control.requests import CONTROL_FOLDER, ControlReply, answer


@pytest.fixture
def folder(tmp_path):
    """An elastic run of one to three nodes, whose launcher has ended; its recipe has 12 rows a step."""
    made = JobFolder(tmp_path / "run")
    made.make()
    made.write_spec(make_spec(nodes=node_range("1:3")))
    made.write_job(Job(engine="local", ident=str(os.getpid()), host="here", submitted_at="now"))
    corpus = write_corpus(tmp_path / "corpus", [[1] * 40] * 9, vocab_size=50)
    write_recipe(made.path / "recipe.toml", corpus, run=made.run, steps=30)
    return made


def resize(folder, nodes, capfd):
    code = main(["launch", "resize", str(folder.run), str(nodes)])
    return code, " ".join(capfd.readouterr().err.split())


def test_a_size_over_which_the_present_batch_does_not_divide_is_refused(folder, capfd):
    assert "No launcher runs" in resize(folder, 3, capfd)[1], "12 rows are divided over three ranks"
    (folder.run / CONTROL_FOLDER).mkdir()
    answer(folder.run, ControlReply(number=1, taken_up=True, said="", batch_size=8, holds_from=3))
    code, said = resize(folder, 3, capfd)
    assert (code, "A global batch of 8 sequences does not divide over 3 ranks" in said) == (2, True), said
    assert "No launcher runs" in resize(folder, 2, capfd)[1]


@pytest.mark.parametrize(("nodes", "told"), [("1:3", "1:3"), ("2", "")])
def test_ranks_are_told_with_how_many_nodes_the_run_may_go_on(monkeypatch, nodes, told):
    monkeypatch.setenv(env.NODES, "of an outer run")
    work_of(make_spec(nodes=node_range(nodes)))
    assert env.variable(env.NODES) == told
