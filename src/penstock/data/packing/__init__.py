"""Rules that place a pool's fragments into rows of L tokens.

A rule is a pure function `pack(lengths, num_rows=..., sequence_length=...) -> Pieces` that places every
token once. `concat` and `best_fit` must fill every row but the last, which may end short: the number of
rows then follows from the number of tokens. `whole` splits nothing and takes the rows that it needs. To add a
rule, write a module and a row in PACKERS; it is then tested by being listed.
"""

from penstock.core.errors import ConfigError, nearest
from penstock.core.table import Table

PACKERS = Table(
    "packing rule",
    {
        "best_fit": "penstock.data.packing.best_fit:pack",
        "concat": "penstock.data.packing.concat:pack",
        "whole": "penstock.data.packing.whole:pack",
    },
)

PADDING_RULES = ("whole",)
"""Rules that pad rows rather than split documents; who takes one says what to do with longer documents."""

OVERLONG = ["truncate", "drop"]
"""What may be done with a document longer than a row: serve its first L tokens, or none of it."""


def check_packing(rule: str, overlong: str | None) -> None:
    """Refuse an unknown rule, and one that pads without word of documents longer than a row.

    Raises:
        UsageError: no such rule.
        ConfigError: overlong is missing, unknown, or of no use to the rule.
    """
    PACKERS[rule]
    if rule in PADDING_RULES and overlong is None:
        raise ConfigError(
            f"Packing {rule!r} splits no document, so one longer than a row cannot be served whole",
            got="overlong unset",
            fix="Choose what to do with those: overlong='truncate' keeps their first tokens, 'drop' none.",
        )
    if rule not in PADDING_RULES and overlong is not None:
        raise ConfigError(
            f"Packing {rule!r} serves documents of any length: overlong is for {', '.join(PADDING_RULES)}",
            got=overlong,
            fix="Leave overlong out, or take packing='whole'.",
        )
    if overlong is not None and overlong not in OVERLONG:
        raise ConfigError("overlong has no such choice", got=overlong, fix=nearest(overlong, OVERLONG))
