"""Why the kit cannot run at all."""


class Unfit(Exception):
    """No GPU, a driver that is too old, options that contradict a result: one sentence, and what to do."""
