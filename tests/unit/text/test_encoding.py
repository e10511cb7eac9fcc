"""Long texts to ids, while other threads run."""

import threading
import time

import pytest
from tests.tiny_models import TEXT

from penstock.text.special_tokens import ids_of
from penstock.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([TEXT] * 9, vocab_size=400)


@pytest.mark.parametrize("special", [False, True])
def test_a_long_text_has_the_ids_of_its_library(special):
    text = f"{TEXT} <|endoftext|>\x00 \U0001f600\n" * 30
    library = TOKENIZER._guard._tokenizer if special else TOKENIZER._plain
    assert len(text) > 3000
    assert TOKENIZER.encode(text, special=special) == library.encode(text, add_special_tokens=False).ids


def test_other_threads_run_while_a_long_text_is_read():
    turns, ended = 0, threading.Event()

    def take_turns():
        nonlocal turns
        while not ended.is_set():
            turns += 1
            time.sleep(0)  # gives the interpreter away: whoever holds it leaves one turn or two

    other = threading.Thread(target=take_turns)
    other.start()
    try:
        before = turns
        ids_of(TEXT * 2000, TOKENIZER._plain)
        taken = turns - before
    finally:
        ended.set()
        other.join()
    assert taken > 20
