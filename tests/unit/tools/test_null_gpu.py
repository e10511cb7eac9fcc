"""What is told of the null GPU: bounds, results that are too old, machine code, the check of `make check`."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tools.filed import changed, complaint, digests, file
from tools.null_gpu import __main__ as main
from tools.null_gpu.bounds import TABLE, Bound, Table, judge
from tools.null_gpu.page import page
from tools.null_gpu.sass import findings, inner_loops, instructions_of

ROOT = Path(__file__).parents[3]
WAITS = Bound(of="serve *", count="waits", at_most=1, now=4, why="ids of the step before")


@pytest.mark.parametrize(
    ("value", "is_within", "is_reached"), [(1, True, True), (4, True, False), (4.05, False, False)]
)
def test_a_count_may_not_grow_until_its_bound_is_reached(value, is_within, is_reached):
    ((judged,), missing) = judge([WAITS], {"serve greedy": {"waits": value}})
    assert (judged.is_within, judged.is_reached, missing) == (is_within, is_reached, [])


def test_without_a_present_value_the_bound_itself_holds():
    bound = Bound(of="loss", count="launches", at_most=69, why="")
    ((judged,), _) = judge([bound], {"loss": {"launches": 70}})
    assert not judged.is_within


def test_a_bound_may_be_a_multiple_of_another_program_and_a_number_more():
    bound = Bound(of="float8", count="launches", than="bfloat16", times=1.3, plus=2, why="")
    ((judged,), _) = judge([bound], {"float8": {"launches": 133}, "bfloat16": {"launches": 100}})
    assert judged.limit == 132
    assert not judged.is_within
    assert judge([bound], {"float8": {"launches": 1}}) == ([], ["launches of float8"])


def test_of_several_bounds_the_first_that_matches_holds():
    table = [
        Bound(of="kernel int4", count="spills", at_most=9, why="known"),
        Bound(of="kernel *", count="spills", at_most=0, why=""),
    ]
    judged, _ = judge(table, {"kernel int4": {"spills": 5}, "kernel int8": {"spills": 5}})
    assert {one.of: one.is_within for one in judged} == {"kernel int4": True, "kernel int8": False}


def test_what_was_to_be_counted_and_was_not_is_named():
    assert judge([WAITS], {"train": {"waits": 0}}) == ([], ["waits of serve *"])


def test_the_table_names_sources_that_are_there():
    table = Table.read(TABLE.read_text())
    assert digests(ROOT, table.sources)
    assert digests(ROOT, table.kit_sources)
    assert all((bound.at_most is None) == bool(bound.than) for bound in table.bounds)


def test_a_source_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'nn/\*\.py'"):
        digests(tmp_path, ["nn/*.py"])


def test_a_result_is_too_old_once_a_source_changes_comes_or_goes(tmp_path):
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b.py").write_text("1")
    filed = digests(tmp_path, ["*.py"])
    assert changed(filed, digests(tmp_path, ["*.py"])) == []
    (tmp_path / "a.py").write_text("2")
    (tmp_path / "b.py").unlink()
    (tmp_path / "c.py").write_text("1")
    assert changed(filed, digests(tmp_path, ["*.py"])) == ["a.py", "b.py", "c.py"]


def test_the_complaint_says_what_changed_and_what_to_do(tmp_path):
    sources = {f"{n}.py": "1" for n in range(9)}
    assert "There is no" in complaint(tmp_path, "null-gpu", sources, "null-gpu")
    file(tmp_path, "null-gpu-2026-01-01", {"sources": sources}, "")
    assert complaint(tmp_path, "null-gpu", sources, "null-gpu") == ""
    said = complaint(tmp_path, "null-gpu", dict.fromkeys(sources, "2"), "null-gpu")
    assert "null-gpu-2026-01-01.json is older than 0.py, 1.py, 2.py, 3.py, 4.py and 4 more" in said
    assert "make null-gpu" in said


def test_a_new_result_replaces_the_earlier_one_and_no_other(tmp_path):
    file(tmp_path, "null-gpu-kit-2026-01-01", {"sources": {}}, "")
    file(tmp_path, "null-gpu-2026-01-01", {"sources": {}}, "")
    file(tmp_path, "null-gpu-2026-01-02", {"sources": {}}, "")
    names = {path.name for path in tmp_path.glob("*.json")}
    assert names == {"null-gpu-kit-2026-01-01.json", "null-gpu-2026-01-02.json"}


def test_the_page_shows_broken_bounds_first_and_sides_beside_each_other():
    counts = {
        "train plain": {"launches": 5, "waits": 1},
        "train bfloat16": {"launches": 9, "waits": 2, "waits_at": {"sync at step.py:3": 2}},
    }
    table = [
        Bound(of="train *", count="launches", at_most=8, why=""),
        Bound(of="train *", count="waits", at_most=1, now=2, why=""),
    ]
    judged, missing = judge([*table, WAITS], counts)
    text = page({"date": "2026-01-01", "torch": "2.11.0", "counts": counts}, judged, missing)
    rows = [line for line in text.splitlines() if line.startswith("| train")]
    assert "**broken**" in rows[0]
    assert "to come" in rows[1]
    assert "| launches | 5 | 9 |" in text
    assert "**not counted**: waits of serve *" in text
    assert "| `sync at step.py:3` | 2 |" in text


LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;            /* 0x00000a0000017a02 */
        /*0010*/                   LDG.E.U8 R2, desc[UR4][R2.64] ;
        /*0020*/                   STL [R1], R9 ;
        /*0030*/                   LDG.E.U16 R5, desc[UR4][R4.64] ;
        /*0040*/              @P1  LDG.E.128 R8, desc[UR4][R6.64] ;
        /*0050*/              @!P0 LDG.E.U16.CONSTANT R5, desc[UR4][R4.64] ;
        /*0060*/              @P0  BRA 0x40 ;
        /*0070*/                   LDL R9, [R1] ;
        /*0080*/              @P2  BRA 0x20 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   BRA 0xa0;
"""


def test_narrow_loads_count_in_loops_without_loops_and_spills_anywhere():
    instructions = instructions_of(LISTING)
    assert len(instructions) == 11
    assert inner_loops(instructions) == [range(0x40, 0x61)]
    assert findings(instructions) == (2, 1)


def test_the_check_imports_no_torch_and_says_what_it_finds():
    script = (
        "import sys; from tools.null_gpu.__main__ import check, Table, TABLE\n"
        "code = check(Table.read(TABLE.read_text())); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert (done.returncode == 0) == (not done.stderr), done.stderr


def test_a_row_of_the_kit_that_crashed_fails_the_check(tmp_path, monkeypatch, capsys):
    rows = [{"name": "fine", "status": "not computed", "why": ""}]
    table = Table((), ("Makefile",), ("Makefile",))
    monkeypatch.setattr(main, "RESULTS", tmp_path)
    for name in (main.COUNTS, main.KIT):
        result = {"sources": digests(ROOT, table.sources), "counts": {}, "parts": {"serving": {"rows": rows}}}
        file(tmp_path, f"{name}-2026-11-29", result)
    assert main.check(table) == 0
    rows.append({"name": "serve 8b", "status": "failed", "why": "OSError: full"})
    file(tmp_path, f"{main.KIT}-2026-11-30", {**result, "parts": {"serving": {"rows": rows}}})
    assert main.check(table) == 1
    assert "serve 8b failed: OSError: full. Mend it, then: make null-gpu-kit." in capsys.readouterr().err


def test_the_filed_result_has_its_counts():
    (path,) = (ROOT / "benchmarks" / "results").glob("null-gpu-????-??-??.json")
    found = json.loads(path.read_text())
    assert found["failed"] == {}
    assert {"train plain", "train bfloat16", "loss", "serve greedy, 1 at once"} <= set(found["counts"])


def launched_kernels():
    """Return the names of the Triton functions of Penstock that no other of them calls."""
    found = set()
    for path in (ROOT / "src" / "penstock").rglob("*_triton.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        called = {
            node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        found |= {
            node.name.lstrip("_")
            for node in nodes
            if isinstance(node, ast.FunctionDef)
            and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
            and node.name not in called
        }
    return found


def test_the_machine_code_of_every_triton_kernel_is_looked_at():
    (path,) = (ROOT / "benchmarks" / "results").glob("null-gpu-????-??-??.json")
    names = [name.removeprefix("kernel ") for name in json.loads(path.read_text())["counts"]]
    missing = {kernel for kernel in launched_kernels() if not any(n.startswith(f"{kernel},") for n in names)}
    assert not missing
    assert len(launched_kernels()) >= 11
