"""How often Python looks for garbage in a process whose modules alone are 300,000 objects.

A look at all of them takes a tenth of a second and finds nothing. Looks come again and again while torch is
imported, and once more when the process ends: of the 2.4 s of a run of two small steps they took 0.65 s.
"""

import gc

_FIRST_LOOK_AFTER = 10_000


def look_seldom() -> None:
    """Look at new objects after 10,000 of them rather than 700, and at old ones as much more seldom."""
    gc.set_threshold(_FIRST_LOOK_AFTER, *gc.get_threshold()[1:])


def look_no_more() -> None:
    """Leave what there is to the system, which takes back all memory of a process that ends."""
    gc.freeze()
