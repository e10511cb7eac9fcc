"""Sample order: sample k of a corpus -> epoch, pool, row; a keyed shuffle without tables."""
