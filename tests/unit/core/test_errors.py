"""Messages: what is wrong, the value, what to do."""

import pytest

from penstock.core import errors
from penstock.core.errors import PenstockError, UsageError, nearest


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PenstockError("It broke"), "It broke."),
        (PenstockError("It broke", got=3), "It broke (got 3)."),
        (PenstockError("It broke", got=None), "It broke (got None)."),
        (PenstockError("It broke", got="x", fix="Mend it."), "It broke (got 'x'). Mend it."),
        (PenstockError("It broke", fix="Mend it."), "It broke. Mend it."),
        (
            PenstockError("Recipe a: no such key. Did you mean 'b'?"),
            "Recipe a: no such key. Did you mean 'b'?",
        ),
    ],
)
def test_a_message_is_the_fault_the_value_and_the_remedy(error: PenstockError, message: str) -> None:
    assert str(error) == message


def test_only_wrong_usage_exits_with_two() -> None:
    tree = [value for value in vars(errors).values() if isinstance(value, type)]
    ours = [kind for kind in tree if issubclass(kind, PenstockError)]
    assert len(ours) > 5
    for kind in ours:
        assert kind.exit_code == (2 if issubclass(kind, UsageError) else 1), kind


def test_the_tree_drawn_in_the_module_is_the_tree() -> None:
    drawn = [line for line in (errors.__doc__ or "").splitlines() if "─" in line]
    names = {line.split("─ ")[1].split()[0] for line in drawn}
    real = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names == real - {"PenstockError"}
    for line in drawn:
        depth, name = line.index("─ ") // 4 + 1, line.split("─ ")[1].split()[0]
        assert getattr(errors, name).__mro__.index(PenstockError) == depth, name


def test_the_nearest_known_name_is_offered_or_else_all_of_them() -> None:
    assert nearest("best-fit", ["concat", "best_fit"]) == "Did you mean 'best_fit'?"
    assert nearest("q", ["b", "a"]) == "Known: a, b."
