"""Packing rules: place a pool's fragments into rows of L tokens.

A rule is a pure function `pack(lengths, num_rows=..., sequence_length=...) -> Pieces` that places every token
once. `concat` and `best_fit` must fill every row but the last, which may be short: the number of rows then
follows from the number of tokens. `whole` splits no fragment and uses as many rows as it needs. To add a
rule, write a module and a row in PACKERS; the tests then cover it.
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
"""Rules that pad rows instead of splitting documents: no row holds a longer document whole."""

OVERLONG = ["truncate", "drop"]
"""Treatment of a document longer than a row: "truncate" serves its first L tokens, "drop" none. Without a
choice such a document is refused."""


def check_packing(rule: str, overlong: str | None) -> None:
    """Check a packing rule and its `overlong` option.

    Raises:
        UsageError: no such rule.
        ConfigError: overlong is unknown, or not used by the rule.
    """
    PACKERS[rule]
    if rule not in PADDING_RULES and overlong is not None:
        raise ConfigError(
            f"Packing {rule!r} serves documents of any length: overlong is for {', '.join(PADDING_RULES)}",
            got=overlong,
            fix="Leave overlong out, or use packing='whole'.",
        )
    if overlong is not None and overlong not in OVERLONG:
        raise ConfigError("overlong has no such choice", got=overlong, fix=nearest(overlong, OVERLONG))


def overlong_unset(documents: str) -> ConfigError:
    """Return the error for documents that no row holds, where nothing says what becomes of them."""
    return ConfigError(
        f"{documents}, and packing splits none: overlong must say what becomes of them",
        got="overlong unset",
        fix="Set overlong='truncate' to keep their first tokens, or 'drop' to leave them out; in a recipe "
        "the key is data.overlong. Or set a longer sequence_length.",
    )
