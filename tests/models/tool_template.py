"""A chat template that shows functions and calls as Hermes and Qwen models are taught them."""

from __future__ import annotations

TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}{{ ' ' + m.name if m.name }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
