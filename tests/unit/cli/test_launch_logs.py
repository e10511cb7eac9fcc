"""`penstock launch logs`: characters of a log that is read in pieces, or while it is written."""

import pytest

from penstock.cli.launch.logs import GrowingLog


@pytest.mark.parametrize("before", range(2**16 - 4, 2**16 + 1))
def test_a_character_at_the_edge_of_a_piece_is_printed_whole(tmp_path, capsys, before):
    text = "x" * before + "日本\n"
    (tmp_path / "log").write_text(text)
    GrowingLog(tmp_path / "log").print_new()
    assert capsys.readouterr().out == text


def test_a_character_that_is_half_written_waits_for_its_rest(tmp_path, capsys):
    log, content = GrowingLog(tmp_path / "log"), "日\n".encode()
    log.print_new()
    for end in range(len(content) + 1):
        (tmp_path / "log").write_bytes(content[:end])
        log.print_new()
    assert capsys.readouterr().out == "日\n"


def test_bytes_that_are_no_text_are_printed_as_such(tmp_path, capsys):
    (tmp_path / "log").write_bytes(b"a\xffb\n")
    GrowingLog(tmp_path / "log").print_new()
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}b\n"
