"""Messages: what is wrong, the value, what to do."""

import pytest

from penstock.core import errors
from penstock.core.errors import PenstockError, UsageError, near_match, nearest


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PenstockError("It broke"), "It broke."),
        (PenstockError("It broke", got=3), "It broke (got 3)."),
        (PenstockError("It broke", got=None), "It broke (got None)."),
        (PenstockError("It broke", got="x", fix="Mend it."), "It broke (got 'x'). Mend it."),
        (PenstockError("It broke", got="x" * 10_000), f"It broke (got '{'x' * 1999}...)."),
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


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lama3-8b", "llama3-8b"),
        ("optmizer", "optimizer"),
        ("recieve", "receive"),
        ("seqeunce_lenght", "sequence_length"),
        ("Warmup-Steps", "warmup_steps"),
        ("warmupsteps", "warmup_steps"),
        ("V100", "V100-32GB"),
        ("eval", "evaluate"),
        ("top_pp", "top_p"),
        ("/models/id", "/v2/models/id"),
    ],
)
def test_a_typing_error_or_a_part_of_one_name_is_understood(typed: str, meant: str) -> None:
    assert near_match(typed, [meant, "something_else", "another"]) == meant


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (
            "llama mistral qwen2 qwen3 granite",
            "mixtral ministral pixtral qwen2_moe qwen3_moe granitemoe llava",
        ),
        (
            "llama3-8b llama2-70b mistral-7b-v0.3 qwen3-8b",
            "mixtral-8x7b llama4-8b llama3-80b llama2-7b qwen3-80b",
        ),
        ("H100-80GB H200 B200 A10G L40S MI300X", "H20 GH200 GB200 A10 L4 L40 MI300A H800 H100-96GB"),
        ("bfloat16 float32 uint16 uint32 int4", "float16 float64 int16 int32 int8 fp8 uint64"),
        ("adamw adamw_8bit muon", "adam sgd lion lamb adamax adamw_4bit"),
        ("best_fit concat whole", "first_fit next_fit sequential hole_punch"),
        ("cosine constant wsd", "linear sine polynomial"),
        ("max_tokens top_k beta1 start prefix encode", "min_tokens top_p beta2 stop suffix decode"),
        ("export report train tune eval train-speculator", "import deploy test run"),
    ],
    ids=lambda words: words.split()[0],
)
def test_a_word_that_means_another_thing_is_not_hinted_at_ours(known: str, words: str) -> None:
    hints = {word: near_match(word, known.split()) for word in words.split()}
    assert not {word: hint for word, hint in hints.items() if hint}
