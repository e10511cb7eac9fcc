"""Chat templates of the kinds that models come with."""

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {{- '<|im_start|>assistant\\n' + message.content | trim + '<|im_end|>\\n' }}
        {% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'system' %}{% continue %}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
JSON = "{{ messages | tojson(indent=2) }}{{ messages[0].content | upper }}"
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "json": JSON}
