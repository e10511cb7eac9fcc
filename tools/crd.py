"""Write the fields of a TrainingRun into deploy/operator/crd.yaml, from those of the dataclasses.

A field of the file that is one of a dataclass gets its text, its choices and its limits.

python -m tools.crd           write it
python -m tools.crd --check   fail if it differs
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from penstock.cli.options import field_texts
from penstock.core.limits import Limit, limit_of
from penstock.launch.pods.pod import PodSpec, PodVolume
from penstock.launch.spec import RunSpec

CRD = Path(__file__).resolve().parent.parent / "deploy/operator/crd.yaml"
_OWN = "networkProvider"  # a TrainingRun has fewer providers than a pod
_WRITTEN = ("minimum", "maximum", "maxLength", "pattern", "enum", "description")
_LINE = re.compile(r"^( +)(\w+): (\{type: (?:string|integer|number).*\})$")
_INDENT = " " * 16  # of the fields of `spec`; those of a volume are deeper

Schema = dict[str, Any]  # Any: YAML


def schemas_of(*kinds: type) -> Iterator[tuple[str, Schema]]:
    """Yield the name of each field of some dataclasses in a TrainingRun, and what they say of it."""
    for kind in kinds:
        types, texts = get_type_hints(kind), field_texts(kind)
        found: tuple[Field[Any], ...] = fields(kind)
        for one in found:
            schema = _limits(
                limit_of(one) or Limit(), is_text=types[one.name] is str, may_be_empty=one.default == ""
            )
            if get_origin(types[one.name]) is Literal:
                schema["enum"] = list(get_args(types[one.name]))
            if text := texts.get(one.name):
                schema["description"] = " ".join(text.split())
            first, *words = one.name.removesuffix("_s").split("_")
            yield first + "".join(word.capitalize() for word in words), schema


def _limits(limit: Limit, *, is_text: bool, may_be_empty: bool) -> Schema:
    if is_text:
        length = {"maxLength": limit.longest} if limit.longest else {}
        return length | (
            {"pattern": f"^({limit.pattern}){'?' if may_be_empty else ''}$"} if limit.pattern else {}
        )
    bounds = {"minimum": limit.least, "maximum": limit.most}
    return {key: int(-(-bound // 1)) for key, bound in bounds.items() if bound is not None}


def written(text: str) -> str:
    """Return the text of the CRD with what the dataclasses say."""
    fields_of_run, fields_of_volume = dict(schemas_of(RunSpec, PodSpec)), dict(schemas_of(PodVolume))
    head, status, tail = text.partition("            status:\n")
    lines = [
        _line(line, fields_of_run if line.startswith(f"{_INDENT}{line.lstrip()}") else fields_of_volume)
        for line in head.split("\n")
    ]
    return "\n".join(lines) + status + tail


def _line(line: str, known: Mapping[str, Schema]) -> str:
    match = _LINE.match(line)
    if match is None or match[2] not in known or match[2] == _OWN:
        return line
    schema = {key: value for key, value in yaml.safe_load(match[3]).items() if key not in _WRITTEN}
    of_field = known[match[2]]
    if schema["type"] == "string" and "minimum" in of_field:  # a time, which is written with its unit
        of_field = {"description": of_field["description"]}
    schema |= of_field
    return (
        f"{match[1]}{match[2]}: {{{', '.join(f'{key}: {_value(key, one)}' for key, one in schema.items())}}}"
    )


def _value(key: str, value: Any) -> str:  # Any: YAML
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if key == "pattern":
        return "'" + str(value).replace("'", "''") + "'"
    return f'"{value}"' if key == "description" else str(value)


def main() -> int:
    """Write or check the file."""
    before = CRD.read_text()
    after = written(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            print(f"{CRD.name} does not say what the dataclasses do: python -m tools.crd", file=sys.stderr)
        return int(before != after)
    CRD.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
