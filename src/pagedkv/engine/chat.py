"""The messages of a chat as one prompt, in the way that the model was taught."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv.errors import InvalidInput


def chat_token_ids(
    tokenizer: Any,
    messages: Sequence[Any],
    name: str,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The token ids of `messages`, ending where the model's answer begins.

    Without `add_generation_prompt` they end with the last message; with `continue_final_message`
    they do, and it is left open. `template_arguments` are variables of the template, `tools`
    functions that the model may call.

    Raises `InvalidInput` for a model without a chat template, or messages that it does not take.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput(
            f"{name} is a chat, but the model has no chat template: give text or token ids"
        )
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise InvalidInput(
                f'{name}: a message needs a role and a content, like {{"role": "user", '
                '"content": "Hello"}'
            )
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            **{
                **(template_arguments or {}),
                "tokenize": False,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                **({"tools": list(tools)} if tools else {}),
            },
        )
    except Exception as problem:  # templates raise what they like
        line = (str(problem) or type(problem).__name__).splitlines()[0]
        raise InvalidInput(f"{name}: the chat template refuses the messages: {line}") from problem
    # The template brings its own special tokens.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
