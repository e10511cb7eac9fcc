"""Every log call of the source: a sentence whose values are named, the same names as its keys."""

import ast
from functools import cache
from pathlib import Path
from string import Formatter

import penstock

ROOT = Path(penstock.__file__).parent
LOGGERS = {"log", "logger", "_log"}
LEVELS = {"debug", "info", "warning", "error", "exception"}
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
def trees():
    """Return the syntax tree of each file that logs."""
    return {
        str(path.relative_to(ROOT)): ast.parse(text)
        for path in sorted(ROOT.rglob("*.py"))
        if "logging.getLogger" in (text := path.read_text()) or "core.log import" in text
    }


def test_the_keys_of_an_event_are_those_of_its_sentence():
    events = [
        (f"{file}:{node.lineno}", node) for file, tree in trees().items() for node in calls(tree, is_event)
    ]
    assert len(events) > 100
    for where, call in events:
        name, sentence = (ast.literal_eval(argument) for argument in call.args)
        assert name.replace("_", "").isalpha(), where
        named = {field.partition(".")[0] for _, field, _, _ in Formatter().parse(sentence) if field}
        keys = {keyword.arg for keyword in call.keywords}
        assert named == keys, where
        assert not keys & RESERVED, where


def test_no_value_is_formatted_into_a_message_without_its_name():
    found = []
    for name, tree in trees().items():
        for call in calls(tree, is_log):
            message, *others = call.args
            is_built = isinstance(message, (ast.JoinedStr, ast.BinOp))
            if others or is_built or any(keyword.arg == "extra" for keyword in call.keywords):
                found.append(f"{name}:{call.lineno}")
    assert found == []
