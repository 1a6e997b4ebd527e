"""A chat template that shows functions and calls as Hermes and Qwen models are taught them."""

from __future__ import annotations

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call these functions:"
    "{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}{{ '<tool_call>\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ '\n</tool_call>' }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
