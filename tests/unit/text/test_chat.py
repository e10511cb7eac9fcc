"""Chat prompts: templates against transformers, refusals, and the plain transcript."""

import json

import pytest
from tests.chat_templates import TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.core.errors import ModelError, UsageError
from penstock.text.chat_template import ANSWER_MARKS, REASONING_KEYS, ChatTemplate, load_template, render

TALK = [
    {"role": "system", "content": "Answer <briefly> & in \u00fcbung."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello. "},
    {"role": "user", "content": "What is {{ this }}?"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("messages", [TALK, TALK[1:]], ids=["system", "no system"])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_as_in_transformers(source, messages):
    expected, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, **TOKENS
    )
    assert render(messages, ChatTemplate(source=source, variables=TOKENS)) == expected[0]


@pytest.mark.parametrize(
    "options", ["", "ensure_ascii=True", "indent=2, sort_keys=True", "separators=(',', ':')", "true, 1"]
)
def test_a_template_writes_json_as_in_transformers(options):
    source = f"{{{{ messages | tojson({options}) }}}}"
    (expected,), _ = render_jinja_template([TALK], chat_template=source)
    assert render(TALK, ChatTemplate(source=source)) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ documents is defined }} {{ documents is none }} {% if documents %}x{% endif %}",
        "{% set who = 'out' %}{% generation %}{% set who = 'in' %}{{ who }}{% endgeneration %}{{ who }}",
        "{% generation %}{% set new = 1 %}{{ new }}{% endgeneration %}{{ new is defined }}",
        "{% set ns = namespace(n=0) %}{% generation %}{% set ns.n = 2 %}{% endgeneration %}{{ ns.n }}",
        "{% for m in messages %}{% set seen = m.role %}{% generation %}{{ seen }}{% set seen = '-' %}"
        "{% for c in m.content %}{% set seen = c %}{% endfor %}{{ seen }}{% endgeneration %}{{ seen }}"
        "{% endfor %}",
        "{% generation %}{% macro greet(x) %}hi {{ x }}{% endmacro %}{{ greet('a') }}{% endgeneration %}"
        "{{ greet is defined }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{% for c in m.content %}"
        "{% if c == 'l' %}{% continue %}{% elif c == '<' %}{% break %}{% endif %}{{ c }}{% endfor %}"
        "{% endgeneration %}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    ],
)
def test_names_are_known_where_they_are_in_transformers(source):
    (expected,), _ = render_jinja_template([TALK], chat_template=source)
    assert render(TALK, ChatTemplate(source=source)) == expected
    marked = render(TALK, ChatTemplate(source=source), marked=True)
    assert marked.replace(ANSWER_MARKS[0], "").replace(ANSWER_MARKS[1], "") == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% break %}{% endgeneration %}{% endfor %}",
        "{% for m in messages %}{% generation %}{% if m.role == 'user' %}{% continue %}{% endif %}"
        "{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% macro one(m) %}{% break %}{% endmacro %}{% for m in messages %}{{ one(m) }}{% endfor %}",
        "{% break %}",
    ],
)
def test_leaving_a_loop_from_within_another_body_is_refused_as_in_transformers(source):
    with pytest.raises(SyntaxError, match="loop"):
        render_jinja_template([TALK], chat_template=source)
    for marked in (False, True):
        with pytest.raises(ModelError, match=r"template fails: .* loop.*\{% generation %\}.*transformers"):
            render(TALK, ChatTemplate(source=source), marked=marked)


def test_a_template_that_calls_itself_without_end_is_refused():
    source = "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"
    with pytest.raises(ModelError, match="template fails: maximum recursion depth"):
        render(TALK, ChatTemplate(source=source))


@pytest.mark.parametrize("empty", ["", "\n", None])
@pytest.mark.parametrize("key", REASONING_KEYS)
@pytest.mark.parametrize("read", REASONING_KEYS)
def test_empty_reasoning_under_one_key_hides_none_under_another(key, read, empty):
    turn = {"role": "assistant", "content": "3", **dict.fromkeys(REASONING_KEYS, empty), key: "Why"}
    source = f"{{% for m in messages %}}{{{{ m.{read} }}}}{{% endfor %}}"
    assert render([turn], ChatTemplate(source=source)) == "Why"


@pytest.mark.parametrize("other", ["Because", "Why "])
def test_different_reasoning_under_two_keys_is_refused(other):
    turn = {"role": "assistant", "content": "3", "thinking": "Why", "reasoning": other}
    with pytest.raises(UsageError, match=r"different reasoning under thinking and reasoning .*leave one"):
        render([turn], ChatTemplate(source="{{ messages }}"))


def test_documents_that_are_given_reach_the_template():
    source = "{% for d in documents %}{{ d }},{% endfor %}"
    assert render(TALK, ChatTemplate(source=source), variables={"documents": ["a", "b"]}) == "a,b,"


def test_a_template_may_ask_for_the_date():
    assert render(TALK, ChatTemplate(source="{{ strftime_now('%Y') }}")).startswith("20")


def test_the_plain_transcript_ends_where_the_answer_begins():
    assert (
        render(TALK[1:], ChatTemplate())
        == "User: Hi\n\nAssistant: Hello.\n\nUser: What is {{ this }}?\n\nAssistant:"
    )


def test_the_file_wins_over_the_config_and_special_tokens_are_read(tmp_path):
    config = {"chat_template": "old", "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_template(tmp_path) == ChatTemplate(source="old", variables=TOKENS)
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_template(tmp_path).source == "new"


def test_of_several_named_templates_one_is_for_tools(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "none"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_template(tmp_path)
    assert render(messages, template) == "none"
    assert render(messages, template, tools=[{}]) == "tools"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("of a file")
    (tmp_path / "chat_template.jinja").write_text("plain")
    assert render(messages, load_template(tmp_path)) == "plain"
    assert render(messages, load_template(tmp_path), tools=[{}]) == "of a file"


def test_a_role_that_the_plain_transcript_does_not_know_is_named():
    with pytest.raises(UsageError, match=r"no roles but system, user and assistant \(got 'usr'\)"):
        render([{"role": "usr", "content": "hello"}], ChatTemplate())


def test_a_folder_without_a_template_has_the_plain_transcript(tmp_path):
    assert load_template(tmp_path) == ChatTemplate()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% if %}",
        "{{ messages[0].content / 0 }}",
        "{{ missing.field }}",
    ],
)
def test_a_template_that_breaks_out_or_breaks_down_is_an_error(source):
    with pytest.raises(ModelError, match="chat template fails"):
        render(TALK, ChatTemplate(source=source))


def test_a_template_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read: .+ Restore it\."):
        load_template(tmp_path)


def test_messages_that_a_template_refuses_are_the_users_error():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        render(TALK, ChatTemplate(source=source))


@pytest.mark.parametrize(
    ("source", "variables", "said"),
    [
        (
            "{% for word in words %}x{% endfor %}",
            {"words": 5, "unused": 1},
            r"variables words \(int\): 'int'",
        ),
        ("{{ effort + 1 }}", {"effort": "high"}, r"effort \(str\): can only concatenate"),
        ("{{ tags | dictsort }}", {"tags": 1.5}, r"tags \(float\): .*'items'"),
        ("{{ a | length }}{{ b }}", {"b": True, "a": None}, r"b \(bool\), a \(NoneType\): .*len"),
        ("{{ raise_exception('no') }}", {"raise_exception": []}, r"raise_exception \(list\): .*callable"),
    ],
)
def test_variables_that_break_a_template_are_the_users_error_and_named(source, variables, said):
    with pytest.raises(UsageError, match=said) as refused:
        render(TALK, ChatTemplate(source=source), variables=variables)
    assert "unused" not in str(refused.value)


def test_a_template_that_fails_also_without_the_variables_is_the_models_error():
    source = "{{ loud }}{{ messages[0].content / 0 }}"
    with pytest.raises(ModelError, match="chat template fails: unsupported"):
        render(TALK, ChatTemplate(source=source), variables={"loud": True})


def test_no_message_is_refused():
    with pytest.raises(UsageError, match="no message"):
        render([], ChatTemplate())


def test_a_broken_tokenizer_config_is_a_model_error(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_template(tmp_path)
