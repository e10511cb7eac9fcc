"""What the exchange of a mean between ranks sends (exchange.py); imports no torch."""

from penstock.parallel.encoded_size import CodecName, encoded_bytes


def exchange_bytes(size: int, *, ranks: int, codec: CodecName) -> float:
    """Return the bytes that each of some ranks sends so that all have the mean of `size` numbers.

    There and back, each time all parts but its own: what a ring's all-reduce sends.

    >>> exchange_bytes(1024, ranks=2, codec="float32"), exchange_bytes(1024, ranks=4, codec="int8")
    (4096.0, 1584.0)
    """
    return 2 * (ranks - 1) / ranks * encoded_bytes(size, codec)
