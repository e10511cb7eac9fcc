"""Which rank a hang is blamed on, from what the ranks wrote."""

from penstock.obs.hang_report import LastWords, diagnose


def words(rank, collectives, *, step=7, doing="step", call="wait (gloo.py:1)", last="gloo:all_reduce"):
    return LastWords(
        rank=rank,
        host=f"node-{rank}",
        pid=100 + rank,
        at=0.0,
        step=step,
        doing=doing,
        num_collectives=collectives,
        last_collective=last,
        stacks={"MainThread": ("train (loop.py:1)", call)},
    )


def said(*found, world_size=4):
    return diagnose(found, world_size=world_size, waited_s=600)


def test_a_rank_that_never_came_to_the_collective_is_named_with_its_place():
    text = said(words(0, 90), words(1, 90), words(2, 88, call="read (disk.py:9)"), words(3, 90))
    assert "No step was finished for 600 s" in text
    assert "Ranks 0, 1, 3 wait in step 7 (step) for gloo:all_reduce, collective 90" in text
    assert "Rank 2 on node-2 (pid 102) has begun 88 collectives" in text
    assert "at read (disk.py:9)" in text


def test_a_rank_that_says_nothing_is_the_one_that_is_waited_for():
    text = said(words(0, 90), words(1, 90), words(3, 90))
    assert "Rank 2 wrote nothing: frozen, dead, or cut off" in text
    assert "Ranks 0, 1, 3 wait" in text


def test_who_is_one_collective_behind_a_silent_rank_is_not_blamed():
    text = said(words(0, 90), words(1, 89), words(3, 90))
    assert "Ranks 0, 1, 3 wait" in text
    assert "Rank 2 wrote nothing" in text


def test_of_ranks_that_speak_the_one_with_the_fewest_collectives_is_blamed():
    text = said(words(0, 90), words(1, 89), words(2, 85, call="read (disk.py:9)"), words(3, 90))
    assert "Ranks 0, 1, 3 wait" in text
    assert text.count("has begun") == 1
    assert "Rank 2 on node-2 (pid 102) has begun 85 collectives" in text


def test_where_all_wait_for_one_collective_the_network_is_looked_at():
    text = said(*(words(rank, 90) for rank in range(4)))
    assert "All ranks have begun the same 90 collectives" in text
    assert "Look at the network" in text
    assert "wrote nothing" not in text


def test_a_rank_whose_state_was_not_read_is_neither_silent_nor_one_of_all():
    text = diagnose([words(0, 90), words(1, 90)], world_size=3, unread=[2, 7])
    assert "All other ranks have begun the same 90 collectives" in text
    assert "Rank 2 wrote what was not read: the others may wait for it" in text
    assert "wrote nothing" not in text


def test_hundreds_of_ranks_are_counted_rather_than_listed():
    text = said(words(0, 5), world_size=1000)
    assert "Ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more wrote nothing" in text


def test_a_rank_without_a_collective_or_a_stack_is_still_described():
    text = diagnose(
        [words(0, 3), LastWords(
            rank=1, host="h", pid=1, at=0.0, step=0, doing="start", num_collectives=0, last_collective=""
        )],
        world_size=2,
        waited_s=2.0,
    )  # fmt: skip
    assert "Rank 1 on h (pid 1) has begun 0 collectives" in text
    assert "an unknown place" in text
