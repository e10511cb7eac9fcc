"""`penstock plan` as a user types it: plans, files, JSON, and what is refused."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from penstock.cli.main import main
from penstock.plan.hardware import Cluster, cluster_names, cluster_of
from penstock.testing.corpora import write_corpus


def said(capsys, *words):
    code = main(["plan", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out, " ".join(out.err.split())


def test_a_preset_is_planned_on_a_shipped_cluster_in_words(capsys):
    code, out, err = said(capsys, "--model", "llama3.2-1b", "--cluster", "vela", "--tokens", "100G")
    assert code == 0, err
    for words in (
        "tokens/s/device",
        "MFU",
        "Chosen (*):",
        "memory",
        "days",
        "for the machines",
        "limited by",
    ):
        assert words in out


def test_a_small_job_on_a_slow_network_has_figures_other_than_zero(capsys, tmp_path):
    cluster = tmp_path / "slow.toml"
    shipped = (Path("recipes") / "clusters" / "two-cpus.toml").read_text()
    cluster.write_text(shipped.replace("nic_gbit_s = 1", "nic_gbit_s = 0.05"))
    shards = ("--set", "parallel.shard=4", "--set", "parallel.pipeline=1")
    words = ("--model", "recipes/tiny.toml", "--cluster", cluster, "--tokens", "100k")
    code, out, err = said(capsys, *words, *shards)
    assert code == 0, err
    network = re.search(r"network +([\d.]+) Gbit/s a node", out)
    assert network
    assert 0 < float(network[1]) < 0.1
    assert "100k tokens: " in out
    assert "0.0 days" not in out


def test_a_plan_in_json_has_every_part_with_its_unit(capsys):
    words = ("--model", "llama3.2-1b", "--cluster", "vela", "--tokens", "100G", "--json")
    code, out, err = said(capsys, *words)
    assert code == 0, err
    found = json.loads(out)
    assert found["cluster"]["devices"] == 128
    assert found["days"] > 0
    assert found["cost"] == pytest.approx(found["days"] * 24 * 16 * 32.0)
    best = found["best"]
    assert sum(best["step_split_s"].values()) == pytest.approx(best["step_s"], rel=0.02)
    parts = dict(best["memory_bytes"])
    assert parts.pop("total") == sum(parts.values())
    assert 0 < best["mfu"] <= best["hfu"] < 1
    assert found["pareto"]
    assert all({"change", "gain", "exact"} <= set(one) for one in found["helps"])


def test_a_plan_is_written_as_a_recipe_that_checks_and_drawn(capsys, tmp_path):
    recipe, drawn = tmp_path / "planned.toml", tmp_path / "timeline"
    words = ("--model", "llama3.2-1b", "--cluster", "h100-ethernet", "--tokens", "10G")
    code, _, err = said(capsys, *words, "--out", recipe, "--explain", drawn)
    assert code == 0, err
    assert main(["recipes", "check", str(recipe), "--devices", "64"]) == 0
    ET.parse(drawn / "timeline.svg")
    assert json.loads((drawn / "timeline.json").read_text())["traceEvents"]


def test_what_a_recipe_decides_is_not_planned_otherwise(capsys, tmp_path):
    recipe = tmp_path / "mine.toml"
    text = Path("recipes/llama3-8b.toml").read_text()
    recipe.write_text(text.replace("replicate = -1", "replicate = 16\ntensor = 1"))
    code, out, err = said(
        capsys, "--model", recipe, "--cluster", "vela", "--set", "recompute.policy=full", "--json"
    )
    assert code == 0, err
    best = json.loads(out)["best"]
    assert best["layout"] == {"pipeline": 1, "replicate": 16, "shard": 8, "context": 1, "tensor": 1}
    assert (best["micro_batch_size"], best["activations"]) == (1, {"full": 32})


def test_the_vocabulary_is_that_of_the_corpora_where_they_can_be_read(capsys, tmp_path):
    write_corpus(tmp_path / "small", [[1] * 6] * 20, vocab_size=500)
    words = ("--model", "recipes/tiny.toml", "--cluster", "two-cpus", "--json")
    found = {}
    for name, path in (("read", tmp_path / "small"), ("missing", tmp_path / "none")):
        code, out, err = said(capsys, *words, "--set", f"data.corpora.docs.path={path}")
        assert code == 0, err
        assumes = "model.vocab_size follows from the corpora: 32,768 assumed. "
        assert (assumes in err) == (name == "missing")
        found[name] = json.loads(out)["parameters"]
    _, out, _ = said(capsys, *words, "--set", "model.vocab_size=500")
    assert found["missing"] > found["read"] == json.loads(out)["parameters"]


def test_generation_is_planned_for_what_fits(capsys):
    words = ("--model", "llama2-70b", "--cluster", "vela", "--inference", "--length", "1024")
    code, out, err = said(capsys, *words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert {way["tensor"] for way in found} <= {2, 4, 8}, "140 GB do not fit into one"
    (alone,) = (way for way in found if (way["tensor"], way["batch"]) == (8, 1))
    assert 0.025 < alone["token_s"] < 0.032, "as the 29 ms of IBM: the host launches every kernel"
    assert all("never measured on A100-80GB" in way["basis"] for way in found)
    _, out, _ = said(capsys, *words)
    assert "ms/token" in out
    assert "CUDA graphs: 2 each for 1, 2, 4, 8, 16, 32, 64, 128, 256 sequences" in out
    assert all(way["graphs"] is None for way in found), "several ranks have none"
    code, _, err = said(capsys, "--model", "llama2-70b", "--cluster", "two-cpus", "--inference")
    assert code == 2
    assert "has no figures of the engine on CPUs" in " ".join(err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "llama3-8", "--cluster", "vela"), "Did you mean 'llama3-8b'"),
        (("--model", "llama3-8b", "--cluster", "velo"), "Did you mean 'vela'"),
        (("--model", "llama3-8b", "--cluster", "nowhere.toml"), "does not exist"),
        (("--model", "llama3-70b", "--cluster", "two-cpus"), "The smallest plan on 4 devices takes"),
        (("--model", "llama3-8b", "--cluster", "vela", "--headroom", "1.5"), "--headroom must be from 0"),
        (("--model", "llama3-8b", "--cluster", "vela", "--rows", "0"), "--rows must be at least 1"),
        (("--model", "llama3-8b", "--cluster", "vela", "--length", "0"), "--length must be at least 1"),
        (("--model", "llama3-8b", "--cluster", "vela", "--set", "model=3"), "model must be a section"),
        (("--model", "llama3-8b", "--cluster", "vela", "--set", "data=3"), "data must be a section"),
        (("--model", "llama3-8b", "--cluster", "vela", "--out", "nowhere/x.toml"), "The folder of --out"),
        (
            ("--model", "llama3-8b", "--cluster", "vela", "--rows", "77", "--set", "parallel.pipeline=1"),
            "77 rows over 128 devices",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(capsys, words, message):
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_wrong_cluster_file_is_refused_with_its_key(capsys, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('nodes = 0\ndevice = "A100-80GB"\n')
    code, _, err = said(capsys, "--model", "llama3-8b", "--cluster", path)
    assert code == 2
    assert "nodes must be 1 or more" in err


@pytest.mark.parametrize("name", cluster_names())
def test_a_shipped_cluster_is_sound_and_named_as_its_file(name):
    cluster = cluster_of(name)
    assert isinstance(cluster, Cluster)
    assert cluster.name == name
