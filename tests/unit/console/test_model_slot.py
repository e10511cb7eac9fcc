"""One model at a time: shared by those who ask for it, refused to others, opened again where it has ended."""

from pathlib import Path
from threading import Event, Thread

import pytest

from penstock.console.workers import model_slot
from penstock.console.workers.model_slot import ModelBusy, ModelKey, ModelSlot, opener
from penstock.core.errors import PenstockError

FIRST = ModelKey(Path("a"), 8, "first")
LATER = ModelKey(Path("a"), 16, "first")


class Model:
    def __init__(self, log, key):
        self.log, self.key, self.is_alive = log, key, True
        log.append(("open", key.step))

    def close(self):
        self.log.append(("close", self.key.step))
        self.is_alive = False


@pytest.fixture
def log():
    return []


@pytest.fixture
def slot(log):
    slot = ModelSlot(lambda key, *, context: Model(log, key))  # noqa: ARG005
    yield slot
    slot.close()


def test_a_model_is_opened_once_for_all_who_share_it(slot, log):
    with slot.lent(FIRST) as one, slot.lent(FIRST, context=9) as other:
        assert one is other
    with slot.lent(FIRST):
        pass
    assert log == [("open", 8)]
    slot.close()
    assert log == [("open", 8), ("close", 8)]


def test_another_model_is_refused_while_one_is_in_use_and_replaces_it_when_it_is_idle(slot, log):
    with (
        slot.lent(FIRST),
        pytest.raises(ModelBusy, match="in use: the checkpoint of step 8 of first"),
        slot.lent(LATER),
    ):
        pass
    with slot.lent(LATER):
        assert slot.key == LATER
    assert log == [("open", 8), ("close", 8), ("open", 16)]


def test_a_longer_text_opens_the_model_again_once_it_is_idle(slot, log):
    with slot.lent(FIRST), pytest.raises(ModelBusy, match="in use"), slot.lent(FIRST, context=9000):
        pass
    with slot.lent(FIRST, context=9000):
        pass
    assert log == [("open", 8), ("close", 8), ("open", 8)]


def test_a_model_whose_process_has_ended_is_opened_again_also_while_somebody_used_it(slot, log):
    with slot.lent(FIRST) as first:
        first.is_alive = False
        assert slot.key is None
        with slot.lent(LATER):
            assert slot.key == LATER
    with slot.lent(FIRST):
        pass
    assert log == [("open", 8), ("close", 8), ("open", 16), ("close", 16), ("open", 8)]


def test_who_asks_while_a_model_is_being_opened_is_refused(log):
    begun, go_on = Event(), Event()

    def slowly(key, *, context):  # noqa: ARG001
        begun.set()
        assert go_on.wait(60)
        return Model(log, key)

    slot = ModelSlot(slowly)

    def use():
        with slot.lent(FIRST):
            pass

    thread = Thread(target=use)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(ModelBusy, match="opens the checkpoint"), slot.lent(FIRST):
        pass
    go_on.set()
    thread.join()
    with slot.lent(FIRST):
        assert log == [("open", 8)]
    slot.close()


def test_a_model_that_cannot_be_opened_leaves_the_place_free(slot, log, monkeypatch):
    def fails(key, *, context):  # noqa: ARG001
        raise PenstockError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(slot, "_open_model", fails)
        with pytest.raises(PenstockError, match="no room"), slot.lent(FIRST):
            pass
    with slot.lent(LATER):
        assert log == [("open", 16)]


def test_a_console_that_ends_opens_nothing_more(slot, log):
    slot.close()
    with pytest.raises(ModelBusy, match="ending"), slot.lent(FIRST):
        pass
    assert log == []


def test_a_model_that_opens_while_the_console_ends_is_closed(slot, log, monkeypatch):
    def ends(key, *, context):  # noqa: ARG001
        slot.close()
        return Model(log, key)

    monkeypatch.setattr(slot, "_open_model", ends)
    with pytest.raises(ModelBusy, match="ending"), slot.lent(FIRST):
        pass
    assert log == [("open", 8), ("close", 8)]


class Sizes:
    """A process that knows the size of one model."""

    def ask(self, question, run, *, step):
        assert (question, run, step) == ("model", FIRST.run, FIRST.step)
        return {"weight_bytes": 1 << 30, "token_bytes": 1 << 10, "context": 8192}


def test_a_model_gets_memory_for_its_weights_and_for_the_text_and_no_more(monkeypatch):
    made = []
    monkeypatch.setattr(model_slot, "ModelProcess", lambda *words, **options: made.append((words, options)))
    monkeypatch.setattr(model_slot.env, "available_bytes", lambda: 2 << 30)
    for context, cached in ((4096, 4 * 4096), (100_000, 4 * 4096), (100, 400)):
        opener(Sizes())(FIRST, context=context)
        ((words, options),) = made
        assert words == (FIRST.run, FIRST.step)
        assert options == {"context": min(context, 8192), "cache_bytes": (cached + 16) << 10}
        made.clear()
    monkeypatch.setattr(model_slot.env, "available_bytes", lambda: 1 << 30)
    with pytest.raises(PenstockError, match=r"would take 1\.. GiB of memory, and 1.* GiB are free"):
        opener(Sizes())(FIRST, context=4096)
