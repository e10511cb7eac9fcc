"""Write the limits of a TrainingRun's fields into deploy/operator/crd.yaml, from those of the dataclasses.

python -m tools.crd           write it
python -m tools.crd --check   fail if it differs
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import yaml

from penstock.core.limits import Limit, limit_of
from penstock.launch.pod import PodSpec, PodVolume
from penstock.launch.spec import RunSpec

CRD = Path(__file__).resolve().parent.parent / "deploy/operator/crd.yaml"
_LIMITS = ("minimum", "maximum", "maxLength", "pattern")
_LINE = re.compile(r"^( +)(\w+): (\{type: (?:string|integer|number).*\})$")


def limits_of_fields() -> Iterator[tuple[str, Limit]]:
    """Yield the name of each field of a TrainingRun and its limit."""
    for kind in (RunSpec, PodSpec, PodVolume):
        found: tuple[Field[Any], ...] = fields(kind)
        for one in found:
            if limit := limit_of(one):
                first, *words = one.name.removesuffix("_s").split("_")
                yield first + "".join(word.capitalize() for word in words), limit


def written(text: str) -> str:
    """Return the text of the CRD with the limits."""
    limits = dict(limits_of_fields())
    head, status, tail = text.partition("            status:\n")
    return "\n".join(_line(line, limits) for line in head.split("\n")) + status + tail


def _line(line: str, limits: dict[str, Limit]) -> str:
    match = _LINE.match(line)
    if match is None or match[2] not in limits:
        return line
    limit = limits[match[2]]
    schema = {key: value for key, value in yaml.safe_load(match[3]).items() if key not in _LIMITS}
    told = schema.pop("description", None)
    if schema["type"] == "string":
        schema |= {"maxLength": limit.longest} if limit.longest else {}
        schema |= {"pattern": f"^({limit.pattern})?$"} if limit.pattern else {}
    else:
        for key, bound in (("minimum", limit.least), ("maximum", limit.most)):
            if bound is not None:
                schema[key] = -(-bound // 1) if schema["type"] == "integer" else bound
                schema[key] = int(schema[key])
    if told is not None:
        schema["description"] = told
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
            print(f"{CRD.name} does not have the limits of the fields: python -m tools.crd", file=sys.stderr)
        return int(before != after)
    CRD.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
