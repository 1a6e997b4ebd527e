"""What a client may ask of the server, and how much of it at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pagedkv.errors import InvalidInput

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1_024
"""Of one stop string: the engine looks for each character of it in each token."""
MAX_LOGIT_BIASES = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_TOOLS = 128
"""OpenAI's number."""
MAX_VALUES = 50_000
"""In a body, the token ids of prompts not counted: a chat of 10,000 messages has as many."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Each number is one that a client meets as an error, never as a server that stands still.

    Raises `InvalidInput` for values out of range.
    """

    max_waiting: int = 1_024
    """Sequences that wait for memory or a seat; past it requests are answered with 429."""
    max_streams: int = 1_024
    """Streamed answers that are open at once; past it 429."""
    max_answers: int = 128
    """Answers to one request: its prompts times `n` or `best_of`."""
    max_prompt_tokens: int | None = None
    """Tokens of one prompt; None: what the model takes."""
    max_body_bytes: int = 4 << 20
    """Bytes of a request's body; past it 413."""
    body_s: float = 30.0
    """Seconds for a body to arrive; past it 408."""
    max_connections: int = 4_096
    """Open connections, idle ones included; past it 503."""
    idle_s: float = 30.0
    """Seconds that a connection may be open without a request under way."""
    silent_s: float = 15.0
    """Seconds that a stream may say nothing; before it gets a comment, so that no proxy cuts it."""
    stuck_s: float = 60.0
    """Seconds that a client may read nothing while there is something to read."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                if not value > 0:
                    raise InvalidInput(f"{field.name} is {value}: give more than 0 seconds")
            elif value is not None and value < (least := _LEAST.get(field.name, 1)):
                raise InvalidInput(f"{field.name} is {value}: give at least {least}")


_LEAST = {"max_waiting": 0}
