"""`penstock doctor` as a user types it."""

import json
import os

import pytest

from penstock.plan.hardware import load_cluster
from tests.warm import penstock


def test_one_machine_is_examined_with_its_corpus_and_leaves_nothing_behind(corpus, tmp_path):
    done = penstock("doctor", "--folder", tmp_path, "--corpus", corpus, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == (report["level"] == "red"), done.stdout + done.stderr
    found = {finding["check"]: finding["what"] for finding in report["findings"]}
    assert "tokens/s from one loader" in found["corpus"]
    assert str(tmp_path) in json.dumps(report["findings"])
    assert {"devices", "processors", "limits", "interfaces", "variables", "kernel", "disk"} <= set(found)
    assert all(finding["remedy"] for finding in report["findings"] if finding["level"] != "green")
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - names, not paths


def test_two_processes_are_examined_together_and_reported_once(tmp_path):
    file = tmp_path / "cluster.toml"
    done = penstock("doctor", "--folder", tmp_path, "--processes", 2, "--timeout", 60, "--out", file)
    out = done.stdout
    assert out.count("node 0 (") == 1, out + done.stderr
    assert "between processes" in out
    assert "lo: " in out
    assert "They agree within" in out
    assert "added up over 2" in out
    assert " green, " in out.splitlines()[-1]
    cluster = load_cluster(file)
    assert (cluster.nodes, cluster.devices_per_node) == (1, 2)
    assert "assumed nic_gbit_s = 10" in done.stderr


def test_a_corpus_that_is_not_there_is_a_red_line_and_an_exit_code(tmp_path):
    done = penstock("doctor", "--folder", tmp_path, "--corpus", tmp_path / "absent")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if " corpus " in line]
    assert line.split()[0] == "red"
    assert "absent" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0m"], "--seconds must be above 0"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--store", "ftp://bucket/x"], "--store must be an object store"),
        (["--out", "nowhere/cluster.toml"], "The folder of --out does not exist (got 'nowhere')"),
        (["--processes", "0"], "--processes must be at least 1"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what(words, said, tmp_path):
    done = penstock("doctor", "--folder", tmp_path, *words)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_ranks_without_a_place_to_meet_are_told_how_to_start(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")}
    done = penstock("doctor", "--folder", tmp_path, env={**environment, "RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert "Start them with torchrun" in " ".join(done.stderr.split())


def test_outliers_and_the_report_are_written_for_schedulers_and_programs(tmp_path):
    hosts, report = tmp_path / "exclude.txt", tmp_path / "doctor.json"
    done = penstock("doctor", "--processes", 2, "--checks", "kernel", "--exclude", hosts, "--json", report)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hosts.read_text() == ""
    assert "between processes" in done.stdout
    written = json.loads(report.read_text())
    assert {(link["source"], link["target"]) for link in written["links"]} == {(0, 1), (1, 0)}
    assert written["outliers"] == []


def test_a_network_that_is_not_here_is_refused_with_those_that_are():
    done = penstock("doctor", "--network", "net7", "--checks", "kernel")
    assert done.returncode == 1
    assert "lacks networks of the run: net7" in " ".join(done.stderr.split())
