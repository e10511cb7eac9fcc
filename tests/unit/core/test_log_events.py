"""Every log call of the source: a sentence whose values are named, the same names as its keys."""

import ast
from functools import cache
from pathlib import Path
from string import Formatter

import penstock

ROOT = Path(penstock.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception", "log"}
RESERVED = {"time", "level", "logger", "event", "message", "traceback"}


def calls(tree, is_one):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_one(node.func)]


def is_level(call, *levels):
    return isinstance(call.func, ast.Attribute) and call.func.attr in levels


def is_named(func, name):
    return isinstance(func, ast.Name) and func.id == name


def event_logs(tree):
    """Return the names of a module's logs."""
    values = [
        node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    ]
    return {ast.unparse(one.targets[0]) for one in values if is_named(one.value.func, "EventLog")}


def events_of(tree):
    """Return the calls of a module that make an event."""
    logs = event_logs(tree)
    assert len(logs) == len(calls(tree, lambda func: is_named(func, "EventLog")))

    def makes_event(func):
        is_log = isinstance(func, ast.Attribute) and func.attr in LEVELS and ast.unparse(func.value) in logs
        return is_named(func, "Event") or is_log

    return calls(tree, makes_event)


@cache
def events():
    """Return `file:line`, and the call, of each event."""
    return [
        (f"{path.relative_to(ROOT)}:{call.lineno}", call)
        for path in sorted(ROOT.rglob("*.py"))
        if "core.log import" in (text := path.read_text())
        for call in events_of(ast.parse(text))
    ]


def test_the_keys_of_an_event_are_those_of_its_sentence():
    assert len(events()) > 100
    for where, call in events():
        has_level = is_level(call, "log")
        name, sentence = (ast.literal_eval(argument) for argument in call.args[has_level:])
        assert name.replace("_", "").isalpha(), where
        named = {field.partition(".")[0] for _, field, _, _ in Formatter().parse(sentence) if field}
        takes_traceback = is_level(call, "debug", "info", "warning", "error", "log")
        keys = {keyword.arg for keyword in call.keywords} - ({"exc_info"} if takes_traceback else set())
        assert named == keys, where
        assert not keys & RESERVED, where


def test_modules_log_by_events():
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        for line in path.read_text().splitlines()
        if "getLogger(" in line and path != ROOT / "core" / "log.py" and ".setLevel(" not in line
    ]
    assert found == []
