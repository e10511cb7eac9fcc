"""Every log call of the source: a sentence whose values are named, the same names as its keys."""

import ast
from functools import cache
from pathlib import Path
from string import Formatter

import penstock

ROOT = Path(penstock.__file__).parent
LOGGERS = {"log", "logger", "_log"}
LEVELS = {"debug", "info", "warning", "error", "exception", "log"}
RESERVED = {"time", "level", "logger", "event", "message", "traceback"}


def calls(tree, is_one):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and is_one(node.func)]


def is_log(func):
    return (
        isinstance(func, ast.Attribute)
        and func.attr in LEVELS
        and isinstance(func.value, ast.Name)
        and func.value.id in LOGGERS
    )


def is_event(func):
    return isinstance(func, ast.Name) and func.id == "Event"


@cache
def events():
    """Return `file:line`, and the call, of each event."""
    return [
        (f"{path.relative_to(ROOT)}:{call.lineno}", call)
        for path in sorted(ROOT.rglob("*.py"))
        if "core.log import" in (text := path.read_text())
        for call in calls(ast.parse(text), lambda func: is_event(func) or is_log(func))
    ]


def test_the_keys_of_an_event_are_those_of_its_sentence():
    assert len(events()) > 100
    for where, call in events():
        has_level = isinstance(call.func, ast.Attribute) and call.func.attr == "log"
        name, sentence = (ast.literal_eval(argument) for argument in call.args[has_level:])
        assert name.replace("_", "").isalpha(), where
        named = {field.partition(".")[0] for _, field, _, _ in Formatter().parse(sentence) if field}
        keys = {keyword.arg for keyword in call.keywords} - {"exc_info"}
        assert named == keys, where
        assert not keys & RESERVED, where


def test_modules_log_by_events():
    found = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if "logging.getLogger(__name__)" in path.read_text()
    ]
    assert found == []
