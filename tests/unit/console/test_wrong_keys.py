"""Wrong keys: of a bounded number of addresses, and forgotten after some time."""

from penstock.console.wrong_keys import WrongKeys


def many(wrong, address, number, *, now_s=0.0):
    for _ in range(number):
        wrong.add(address, now_s=now_s)


def test_of_very_many_addresses_the_newest_are_known():
    wrong = WrongKeys()
    many(wrong, "first", 6)
    for number in range(9_999):
        wrong.add(f"10.{number >> 8}.0.{number & 255}", now_s=0)
    assert wrong.wait_s("first", now_s=0) == 1
    many(wrong, "last", 6)
    assert (wrong.wait_s("first", now_s=0), wrong.wait_s("last", now_s=0)) == (0, 1)


def test_an_address_without_wrong_keys_for_ten_minutes_begins_anew():
    wrong = WrongKeys()
    many(wrong, "one", 20)
    assert wrong.wait_s("one", now_s=0) == 30
    wrong.add("one", now_s=601)
    assert wrong.wait_s("one", now_s=601) == 0


def test_addresses_of_one_network_of_ipv6_are_one_client():
    wrong = WrongKeys()
    for number in range(6):
        wrong.add(f"2001:db8::{number}", now_s=0)
    assert wrong.wait_s("2001:db8::ffff", now_s=0) == 1
    assert wrong.wait_s("2001:db8:0:1::1", now_s=0) == 0
    many(wrong, "::ffff:10.0.0.7", 6)
    assert wrong.wait_s("10.0.0.7", now_s=0) == 1
