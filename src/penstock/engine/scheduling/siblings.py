"""Other answers of one request wait until the first has computed the prompt, whose blocks they then share."""

from penstock.engine.scheduling.sequence import Sequence


class Siblings:
    """While a request is in `_held`, one of its sequences computes the prompt and those listed wait."""

    def __init__(self) -> None:
        self._held: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        """Sequences that wait for another."""
        return sum(len(held) for held in self._held.values())

    def holds(self, sequence: Sequence) -> bool:
        """Take a new sequence in; return whether it has to wait for another."""
        if sequence.answer == 0:
            if sequence.request.num_answers > 1:
                self._held[sequence.request_id] = []
            return False
        held = self._held.get(sequence.request_id)
        if held is not None:
            held.append(sequence)
        return held is not None

    def computed(self, sequence: Sequence) -> list[Sequence]:
        """Return those that waited for this one's prompt, which is computed now."""
        return self._held.pop(sequence.request_id, []) if self._held else []

    def remove(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; return whether it waited here."""
        held = self._held.get(sequence.request_id, [])
        if sequence not in held:
            return False
        held.remove(sequence)
        return True

    def heir_of(self, sequence: Sequence) -> Sequence | None:
        """Return the one that computes the prompt instead of one that ended, if it had not."""
        held = self._held.get(sequence.request_id)
        if held:
            return held.pop(0)
        self._held.pop(sequence.request_id, None)
        return None
