"""One model at a time: shared by those who may share it, refused to others, closed when nobody needs it."""

from threading import Event, Thread

import pytest

from penstock.console.models.slot import ModelBusy, ModelKey, ModelSlot

FIRST = ModelKey("answers", "a", 8, "first")
LATER = ModelKey("answers", "a", 16, "first")
SCORING = ModelKey("losses", "a", 8, "first")


class Model:
    def __init__(self, log, key):
        self.log, self.key, self.closed = log, key, Event()
        log.append(("open", key.step))

    def close(self):
        self.log.append(("close", self.key.step))
        self.closed.set()


@pytest.fixture
def log():
    return []


@pytest.fixture
def slot():
    slot = ModelSlot()
    yield slot
    slot.close()


def lent(slot, log, key, *, is_shared=True):
    return slot.lent(key, lambda: Model(log, key), is_shared=is_shared)


def test_a_model_is_opened_once_for_all_who_share_it(slot, log):
    with lent(slot, log, FIRST) as one, lent(slot, log, FIRST) as other:
        assert one is other
    with lent(slot, log, FIRST):
        pass
    assert log == [("open", 8)]
    slot.close()
    assert log == [("open", 8), ("close", 8)]


def test_another_model_is_refused_while_one_is_in_use_and_replaces_it_when_it_is_idle(slot, log):
    with (
        lent(slot, log, FIRST),
        pytest.raises(ModelBusy, match="answers with the checkpoint of step 8 of first"),
        lent(slot, log, LATER),
    ):
        pass
    with lent(slot, log, LATER):
        assert slot.key == LATER
    assert log == [("open", 8), ("close", 8), ("open", 16)]


def test_a_model_that_is_not_shared_has_one_user(slot, log):
    with (
        lent(slot, log, SCORING, is_shared=False),
        pytest.raises(ModelBusy, match="scores rows"),
        lent(slot, log, SCORING, is_shared=False),
    ):
        pass
    with lent(slot, log, SCORING, is_shared=False):
        pass
    assert log == [("open", 8)]


def test_who_asks_while_a_model_is_being_opened_is_refused(slot, log):
    begun, go_on = Event(), Event()

    def slowly():
        begun.set()
        assert go_on.wait(60)
        return Model(log, FIRST)

    def use():
        with slot.lent(FIRST, slowly, is_shared=True):
            pass

    thread = Thread(target=use)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(ModelBusy, match="opens a model"), lent(slot, log, FIRST):
        pass
    go_on.set()
    thread.join()
    with lent(slot, log, FIRST):
        assert log == [("open", 8)]


def test_an_idle_model_is_closed_after_its_time(log):
    slot = ModelSlot(idle_s=0.01)
    with lent(slot, log, FIRST) as model:
        pass
    assert model.closed.wait(60)
    assert slot.key is None
    slot.close()


def test_a_model_that_cannot_be_opened_leaves_the_place_free(slot, log):
    def fails():
        raise ModelBusy("no room")

    with pytest.raises(ModelBusy, match="no room"), slot.lent(FIRST, fails, is_shared=True):
        pass
    with lent(slot, log, LATER):
        assert log == [("open", 16)]


def test_a_console_that_ends_opens_nothing_more(slot, log):
    slot.close()
    with pytest.raises(ModelBusy, match="ending"), lent(slot, log, FIRST):
        pass
    assert log == []


def test_a_model_that_opens_while_the_console_ends_is_closed(slot, log):
    def ends():
        slot.close()
        return Model(log, FIRST)

    with pytest.raises(ModelBusy, match="ending"), slot.lent(FIRST, ends, is_shared=True):
        pass
    assert log == [("open", 8), ("close", 8)]
