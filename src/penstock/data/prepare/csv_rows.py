"""Rows of CSV and TSV files: the first row names the columns, and every value is text.

Quotes, quoted newlines and doubled quotes are as in RFC 4180. The columns of a .csv file are separated by
commas, or by the semicolons or tabs that its first line has more of outside quotes. A line `sep=;` in front,
as Excel writes it, names another separator.
"""

import codecs
import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from penstock.core.units import mib
from penstock.data.prepare.byte_streams import NO_CHARACTER

_SEPARATORS = ",;\t"
_NAMED_SEPARATOR = re.compile(r'"?sep=([^\w"\r\n])"?\s*', re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"?')
_LONE_RETURN = "new-line character"
"""How the csv module's error for a carriage return within a line begins."""


class BrokenCsv(ValueError):
    """A file of which nothing more can be read as rows."""


def csv_rows(pieces: Iterable[bytes], *, tabs: bool, limit: int) -> Iterator[list[str]]:
    """Yield the rows of a file, that of the names first; an empty line is an empty row.

    Args:
        pieces: the file as UTF-8.
        tabs: True if tabs separate the columns.
        limit: characters of a line and of a value, beyond which the file is not read.

    Raises:
        BrokenCsv: from here on nothing can be read, or the names do not tell the columns apart.

    >>> list(csv_rows([b'a;b\\n1;"x\\ny"\\n'], tabs=False, limit=99))
    [['a', 'b'], ['1', 'x\\ny']]
    """
    lines = _lines(pieces, limit)
    filled = (line for line in lines if line.strip("\r\n"))
    first = next(filled, "")
    if named := _NAMED_SEPARATOR.fullmatch(first):
        first = next(filled, "")
    counted = _QUOTED.sub("", first)
    separator = named[1] if named else "\t" if tabs else max(_SEPARATORS, key=counted.count)
    csv.field_size_limit(max(limit, csv.field_size_limit()))
    rows = csv.reader(chain([first] if first else [], lines), delimiter=separator, strict=True)
    try:
        names = [name.strip() for name in next(filter(None, rows), [])]
        if twice := [name for name, count in Counter(names).items() if name and count > 1]:
            raise BrokenCsv(f"the first row names the column {twice[0]!r} twice")
        yield names
        yield from rows
    except csv.Error as error:
        said = str(error)
        if said.startswith(_LONE_RETURN):
            said = "lines end in a carriage return alone: convert them to newlines"
        raise BrokenCsv(said) from None


def _lines(pieces: Iterable[bytes], limit: int) -> Iterator[str]:
    decode = codecs.getincrementaldecoder("utf-8")(NO_CHARACTER).decode
    parts: list[str] = []
    size = 0
    for text in map(decode, pieces):
        *ends, rest = text.split("\n")
        for end in ends:
            yield f"{''.join(parts)}{end}\n"
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > limit:
            raise BrokenCsv(f"a line of more than {mib(limit)}")
    if last := "".join([*parts, decode(b"", final=True)]):
        yield last
