"""Which guessed tokens stand: those that would have been drawn without them; no torch.

A step computes the logits after a sequence's last token and after each of its drafts, as if the drafts
before it stood. The random number of a position is a function of (seed, answer, position), so the token
drawn at a position is known as soon as its logits are, and a draft stands if it is that token. The first
draft that is not takes with it what was drawn behind it.

An answer is then token for token the answer without drafts, for every seed and whatever was guessed. A
guess x stands with probability p(x), as in the rejection sampling of Leviathan et al. (arXiv:2211.17192)
and Chen et al. (arXiv:2302.01318) for guesses that are certain; that who drafts may not change an answer
is the coupling of Daliri, Musco and Suresh (arXiv:2408.07978). See docs/adr/0030.
"""

from collections.abc import Sequence


def kept(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Return the tokens that a step adds to an answer: the drafts that stand, and one more.

    What ends an answer (an end token, its length) may be among them: whoever writes it cuts it there.

    Args:
        drafts: [k] guessed.
        drawn: [k + 1]: the token drawn after each prefix of the drafts, the empty one first.

    >>> kept([7, 8, 9], [7, 8, 4, 1])
    [7, 8, 4]
    """
    assert len(drawn) == len(drafts) + 1, (drafts, drawn)
    fell = next((i for i, token in enumerate(drafts) if token != drawn[i]), len(drafts))
    return list(drawn[: fell + 1])
