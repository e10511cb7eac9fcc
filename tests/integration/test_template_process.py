"""Chat templates in a process of their own: bombs end, what comes after them is answered."""

import threading

import pytest

from penstock.core.errors import ModelError, UsageError
from penstock.text import template_process
from penstock.text.chat_template import ChatTemplate, render
from penstock.text.template_process import TemplateProcess

ASKED = [{"role": "user", "content": "größer 😀 \udc00"}]
GOOD = ChatTemplate(
    source="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{{ bos_token }}{{ tools | tojson }}",
    variables={"bos_token": "<s>"},
)


@pytest.fixture
def process(request):
    made = TemplateProcess(getattr(request, "param", GOOD))
    yield made
    made.close()


def bomb(source):
    """On "boom", the source; on anything else, what was said."""
    said = "{% if messages[0].content == 'boom' %}" + source + "{% endif %}{{ messages[0].content }}"
    return ChatTemplate(source=said)


@pytest.mark.parametrize("template", [GOOD, ChatTemplate()], ids=["template", "transcript"])
def test_it_renders_what_render_does(template):
    process = TemplateProcess(template)
    try:
        for _ in range(3):
            assert process.render(ASKED) == render(ASKED, template)
    finally:
        process.close()


def test_tools_and_variables_arrive(process):
    text = process.render(ASKED, tools=[{"name": "add"}], variables={"bos_token": "mine", "other": 1})
    assert text.endswith('<s>[{"name": "add"}]')  # a request does not change the model's own tokens


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
BOMBS = {"loop": LOOP, "memory": "{{ 'a' * 10**12 }}", "width": "{{ 'a' | center(10**12) }}"}


@pytest.mark.parametrize("process", [bomb(source) for source in BOMBS.values()], ids=BOMBS, indirect=True)
def test_a_bomb_is_refused_and_the_next_request_is_answered(process):
    with pytest.raises(ModelError, match="chat template"):
        process.render([{"role": "user", "content": "boom"}])
    assert process.render([{"role": "user", "content": "calm"}]) == "calm"


def test_refusals_and_faults_are_told_apart():
    refusing = TemplateProcess(ChatTemplate(source="{{ raise_exception('no ' + messages[0].role) }}"))
    failing = TemplateProcess(ChatTemplate(source="{{ messages[0].content.missing.more }}"))
    try:
        with pytest.raises(UsageError, match="refuses these messages: no user"):
            refusing.render(ASKED)
        with pytest.raises(ModelError, match="chat template fails"):
            failing.render(ASKED)
    finally:
        refusing.close()
        failing.close()


def test_threads_get_their_own_answers(process):
    found = {}

    def ask(index):
        found[index] = process.render([{"role": "user", "content": f"number {index}."}])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"number {index}." in text for index, text in found.items())
    assert len(found) == 20


def test_a_process_that_was_killed_is_replaced(process):
    process.render(ASKED)
    process._process.kill()
    with pytest.raises(ModelError, match="took more than"):
        process.render(ASKED)
    assert process.render(ASKED) == render(ASKED, GOOD)


def test_no_torch_is_loaded_there():
    import subprocess
    import sys

    code = (
        f"import sys, {template_process.__name__}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
