"""Published chat templates with tags of `{% generation %}`: added by hand, or from the package trl.

`without_tags` gives them as published. Mistral's follows 7B Instruct v0.3, Granite's 3.0.
"""

import re
from importlib.util import find_spec
from pathlib import Path

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

GRANITE = """\
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>\\n' }}
    {%- for tool in tools %}
    {{- tool | tojson(indent=4) }}
    {%- if not loop.last %}
        {{- '\\n\\n' }}
    {%- endif %}
    {%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
    {{- '<|start_of_role|>system<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- elif message['role'] == 'user' %}
    {{- '<|start_of_role|>user<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- elif message['role'] == 'assistant' %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
    {%- generation %}
    {%- if message.tool_calls %}
        {{- '<|tool_call|>[' }}
        {%- for call in message.tool_calls %}
        {{- call.function | tojson }}{{- ', ' if not loop.last else '' }}
        {%- endfor %}
        {{- ']' }}
    {%- endif %}
    {{- message['content'] + '<|end_of_text|>' }}
    {%- endgeneration %}
    {{- '\\n' }}
    {%- elif message['role'] == 'tool' %}
    {{- '<|start_of_role|>tool_response<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- elif message == user_messages[-1] and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}
        {%- generation %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
        {%- endgeneration %}
    {%- elif message["role"] == "assistant" %}
        {{- " " }}{%- generation %}{{- message["content"] | trim + eos_token }}{%- endgeneration %}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

COHERE_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        "START_OF_TURN_TOKEN",
        "SYSTEM_TOKEN",
        "USER_TOKEN",
        "CHATBOT_TOKEN",
        "START_RESPONSE",
        "END_RESPONSE",
        "END_OF_TURN_TOKEN",
    )
)
"""Special tokens of Cohere's templates that a conversation without tools has."""

OF_TRL = Path(find_spec("trl").origin).parent / "chat_templates"


def tagged(name: str) -> str:
    """Return a template with tags, by its name here or in trl."""
    by_hand = {"chatml": CHATML, "granite": GRANITE, "mistral": MISTRAL}
    if name in by_hand:
        return by_hand[name]
    source = (OF_TRL / f"{name}_training.jinja").read_text()
    return re.sub(r"^\{#-.*?-#\}\s*", "", source, flags=re.DOTALL)  # a comment that names the tags


def without_tags(source: str) -> str:
    """Return a template without its tags; a comment in their place keeps the white space around them."""
    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{#\1 \2#}", source)
