"""Prompts that begin alike share blocks: a full block is named by all that its content depends on.

Keys and values at a position depend on the adapter and on every token up to it. So a block's name is a
hash of the name before it and its own tokens, and the first is hashed with the adapter and the request's
salt: equal names mean equal beginnings. Finding is a walk along the chain until a name is unknown (vLLM's
scheme; a radix tree, Zheng et al., arXiv:2312.07104, finds the same blocks). The hash is cryptographic: a
caller who could make two contents with one name could have others' answers computed from tokens they did
not send.
"""

from array import array
from hashlib import blake2b

from penstock.engine.request import Request
from penstock.engine.scheduling.blocks import BlockPool, Name
from penstock.engine.scheduling.sequence import Sequence


def names_of(sequence: Sequence, *, block_size: int, num_blocks: int) -> list[Name]:
    """Return names of the first full blocks of a sequence, at least so many; computed once and kept."""
    names, tokens = sequence.names, sequence.tokens
    while len(names) < num_blocks:
        start = len(names) * block_size
        before = names[-1] if names else _root(sequence.request)
        names.append(_hash(before + array("q", tokens[start : start + block_size]).tobytes()))
    return names


def find_prefix(pool: BlockPool, sequence: Sequence, *, block_size: int) -> list[int]:
    """Return the blocks that hold the beginning of a sequence, never all of its tokens.

    The last token is always computed: its logits give the next one, or its state is the vector asked for.
    So is everything if the caller wants to see how likely the prompt's tokens were.
    """
    if sequence.is_scored:
        return []
    found: list[int] = []
    for index in range((len(sequence.tokens) - 1) // block_size):
        names = names_of(sequence, block_size=block_size, num_blocks=index + 1)
        block = pool.find(names[index])
        if block is None:
            break
        found.append(block)
    return found


def name_blocks(pool: BlockPool, sequence: Sequence, *, block_size: int, since: int) -> None:
    """Let others find the blocks that became full since so many tokens were computed."""
    first, end = since // block_size, sequence.num_computed // block_size
    if first < end:
        names = names_of(sequence, block_size=block_size, num_blocks=end)
        for index in range(first, end):
            pool.name(sequence.blocks[index], names[index])


def _root(request: Request) -> Name:
    adapter = (request.adapter or "").encode()
    return _hash(len(adapter).to_bytes(4, "big") + adapter + request.salt.encode())


def _hash(content: bytes) -> Name:
    return blake2b(content, digest_size=32).digest()
