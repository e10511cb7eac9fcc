"""Rules that place a pool's fragments into rows of L tokens without padding.

A rule is a pure function `pack(lengths, num_rows=..., sequence_length=...) -> Pieces`. It must place
every token once and fill every row but the last, which may end short. To add one, write a module and
a row in PACKERS; it is then tested by being listed.
"""

from penstock.core.table import Table

PACKERS = Table(
    "packing rule",
    {
        "best_fit": "penstock.data.packing.best_fit:pack",
        "concat": "penstock.data.packing.concat:pack",
    },
)
