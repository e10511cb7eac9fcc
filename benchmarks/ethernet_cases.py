"""What benchmarks/ethernet.py compares: settings, cases, and the recipe of each row."""

from dataclasses import dataclass

from penstock.train.recipe import build_recipe

HOSTS, BLOCKS = 2, 8

KEPT = {"keep_mib": float("inf")}
COPIES = {"replicate": 2}
SETTINGS = {
    "naive": ({"overlap": False}, {}),
    "keep": ({"overlap": False, **KEPT}, {}),
    "overlap": ({}, {}),
    "exact": (KEPT, {}),
    "one card": ({**KEPT, "operations": 1}, {}),
    "copies": ({"overlap": False}, COPIES),
    "hpz": ({}, {"hierarchy": "hpz"}),
    "hybrid": (KEPT, {"hierarchy": "hybrid"}),
    "int8": ({**KEPT, "gather": "int8"}, {}),
    "int8 both": ({**KEPT, "gather": "int8", "reduce": "int8"}, {}),
}
"""Name -> [ethernet], [parallel]."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is the same for all settings that are compared."""

    rate: str
    micro_batches: int = 4
    is_paced: bool = True
    processes: int = 1
    """On each host."""
    nics: int = 1

    @property
    def title(self):
        """For people."""
        compute = "paced" if self.is_paced else "real"
        more = f", {self.nics} NICs each" if self.nics > 1 else ""
        return (
            f"{self.rate}, {compute} compute, {self.micro_batches} micro-batches, 2 x {self.processes}{more}"
        )


LEVERS = ("naive", "keep", "overlap", "exact", "planned", "int8", "int8 both")
WHOLE = [
    *((Case(rate=rate), LEVERS) for rate in ("200mbit", "500mbit", "1gbit")),
    (Case(rate="500mbit", micro_batches=16), ("naive", "exact")),
    (Case(rate="500mbit", nics=2), ("naive", "one card", "exact")),
    (Case(rate="500mbit", processes=2), ("naive", "copies", "hpz", "exact", "hybrid", "planned")),
    *(
        (Case(rate=rate, is_paced=False), ("naive", "overlap", "exact"))
        for rate in ("200mbit", "500mbit", "1gbit")
    ),
]
QUICK = [(Case(rate="500mbit"), ("naive", "overlap", "exact"))]
TINY = [(Case(rate="1gbit", micro_batches=2), ("naive", "exact"))]


def recipe_of(case, ethernet, parallel, *, hidden):
    """Return the recipe of a row."""
    return build_recipe(
        {
            "run": {"dir": "never-written", "steps": 10**6},
            "model": {
                "hidden_size": hidden,
                "intermediate_size": 3 * hidden,
                "num_hidden_layers": BLOCKS,
                "num_attention_heads": max(1, hidden // 32),
                "vocab_size": 512,
            },
            "data": {
                "corpora": {"c": {"path": "synthetic:tokens=1e8,vocab_size=512"}},
                "sequence_length": 16 if case.is_paced else 128,
                "global_batch_size": case.micro_batches * 2 * case.processes,
                "micro_batch_size": 1,
            },
            "schedule": {"rule": "constant"},
            "compute": "float32",
            "ethernet": ethernet,
            "parallel": parallel,
        }
    )
