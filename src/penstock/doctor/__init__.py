"""Examine a machine, or all of a cluster, before a run does; say what is wrong and what to do."""
