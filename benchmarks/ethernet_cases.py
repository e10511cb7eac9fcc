"""What benchmarks/ethernet.py compares: settings, cases, and the recipe of each row."""

from dataclasses import dataclass

from penstock.train.resolve.load import build_recipe

HOSTS, BLOCKS = 2, 8

KEPT = {"keep_mib": float("inf")}
COPIES = {"replicate": 2}
STOCK = {
    "naive": (),
    "prefetch": ("prefetch",),
    "tuned": ("accumulate",),
    "tuned, unshard": ("accumulate", "unshard"),
}
"""Name of a setting of FSDP2 alone -> what is switched on; see stock_fsdp.py."""

AS_KEPT = ({"overlap": False, **KEPT}, {"reshard_after_forward": False})
SETTINGS = {
    "naive": ({"overlap": False}, {}),
    "prefetch": ({"overlap": False}, {}),
    "tuned": AS_KEPT,  # for the planner: what FSDP2 keeps is switched on by stock_fsdp.py
    "tuned, unshard": AS_KEPT,
    "keep": ({"overlap": False, **KEPT}, {}),
    "overlap": ({}, {}),
    "exact": (KEPT, {}),
    "breadth": ({"schedule": "breadth_first"}, {}),
    "breadth, kept": ({"schedule": "breadth_first", **KEPT}, {}),
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
    rounds: int = 1
    """How often the settings take turns."""

    @property
    def title(self):
        """For people."""
        compute = "paced" if self.is_paced else "real"
        more = f", {self.nics} NICs each" if self.nics > 1 else ""
        more += f", {self.rounds} rounds" if self.rounds > 1 else ""
        return (
            f"{self.rate}, {compute} compute, {self.micro_batches} micro-batches, 2 x {self.processes}{more}"
        )


LEVERS = ("naive", "tuned", "overlap", "exact", "breadth", "breadth, kept", "planned", "int8", "int8 both")
BESIDE_TUNED = ("tuned", "tuned, unshard", "exact", "breadth", "breadth, kept")
WHOLE = [
    *((Case(rate=rate), LEVERS) for rate in ("200mbit", "500mbit", "1gbit")),
    (Case(rate="500mbit", rounds=2), ("naive", "prefetch", "keep")),
    *((Case(rate=rate, rounds=3), BESIDE_TUNED) for rate in ("200mbit", "500mbit", "1gbit")),
    (Case(rate="500mbit", micro_batches=16, rounds=2), ("tuned", "exact", "breadth, kept")),
    (Case(rate="500mbit", nics=2), ("naive", "one card", "exact")),
    (Case(rate="500mbit", processes=2), ("naive", "copies", "hpz", "exact", "hybrid", "planned")),
    *(
        (Case(rate=rate, is_paced=False), ("naive", "overlap", "exact"))
        for rate in ("200mbit", "500mbit", "1gbit")
    ),
]
QUICK = [(Case(rate="500mbit"), ("naive", "tuned", "exact", "breadth, kept"))]
TINY = [(Case(rate="1gbit", micro_batches=2, rounds=2), ("prefetch", "tuned, unshard", "breadth, kept"))]


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
