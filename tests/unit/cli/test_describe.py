"""Conversations as `penstock data describe --rows` prints them: learned tokens in colour or between marks."""

from rich.console import Console

from penstock.cli.data.describe import _print_conversations
from penstock.data.tools.describe import TextSample

ASKED, ANSWERED = "<|im_start|>assistant\n", "one\ntwo<|im_end|>"
CHAT = TextSample(
    position=0, text="", whole=True, runs=(("context", ASKED), ("learned", ANSWERED), ("context", "\n"))
)
PAIR = TextSample(
    position=9,
    text="",
    whole=False,
    runs=(
        ("context", "Q"),
        ("learned", "good"),
        ("context-rejected", "Q"),
        ("learned-rejected", "bad\x1b[2J"),
    ),
)


def test_learned_tokens_are_in_colour_on_a_terminal(capsys):
    console = Console(
        force_terminal=True, color_system="standard", no_color=False, highlight=False, soft_wrap=True
    )
    _print_conversations([CHAT, PAIR], console)
    said = capsys.readouterr().out
    assert "learned tokens are in colour:" in said
    assert "<|im_start|>assistant\n  \x1b[1;32mone\x1b[0m\n\x1b[1;32m  two<|im_end|>\x1b[0m\n" in said
    assert "\n  Q\x1b[1;32mgood\x1b[0m\n  -- the rejected side:\n  Q\x1b[1;31mbad\\x1b[2J\x1b[0m ..." in said
    assert "[[" not in said


def test_learned_tokens_are_between_marks_elsewhere(capsys):
    _print_conversations([CHAT, PAIR], Console(force_terminal=False, highlight=False, soft_wrap=True))
    said = capsys.readouterr().out
    assert "learned tokens are between [[ and ]]:" in said
    assert "<|im_start|>assistant\n  [[one\n  two<|im_end|>]]\n" in said
    assert "\n  Q[[good]]\n  -- the rejected side:\n  Q[[bad\\x1b[2J]] ..." in said
    assert "\x1b" not in said
