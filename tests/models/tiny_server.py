"""A server on a tiny model, in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
from openai import OpenAI

from models.tiny_models import tiny_model, tiny_tokenizer
from pagedkv.engine import LLM
from pagedkv.server.lifecycle import Server, listen
from pagedkv.server.limits import ServerLimits
from pagedkv.server.serving import Serving

MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class TinyServer:
    """A server, and clients for it."""

    def __init__(self, server: Server, serving: Serving) -> None:
        self.server = server
        self.serving = serving
        self.llm = serving.llm
        self.url = server.url
        self._clients: list[OpenAI | httpx.Client] = []

    def client(self, **options: Any) -> OpenAI:
        """OpenAI's client, which does not try again behind a test's back."""
        options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        made = OpenAI(base_url=self.url + "/v1", **options)
        self._clients.append(made)
        return made

    def http(self) -> httpx.Client:
        """A plain client."""
        made = httpx.Client(base_url=self.url, timeout=60)
        self._clients.append(made)
        return made

    def hang_up(self) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()

    def wait_until(self, holds: Any) -> None:
        """Wait until something holds; a test that waits for ever fails."""
        for _ in range(3_000):
            if holds():
                return
            time.sleep(0.01)
        raise AssertionError("it never came to that")

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody uses."""
        return self.llm.statistics().memory.used_blocks


def tiny_llm(*, model: Any = None, **options: Any) -> LLM:
    """The tiny llama, or another model, with a tokenizer and a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    options = {
        "num_tokens": 2048,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "tokenizer": tokenizer,
        **options,
    }
    return LLM(model or tiny_model("llama"), **options)


@contextlib.contextmanager
def tiny_server(
    *, limits: ServerLimits | None = None, serving: dict[str, Any] | None = None, **options: Any
) -> Iterator[TinyServer]:
    """A server on a free port, which drains when the context ends."""
    with tiny_llm(**options) as llm:
        made = Serving(llm, model_name=MODEL, limits=limits or ServerLimits())
        server = Server(made, listener=listen("127.0.0.1", 0), **(serving or {}))
        failure: list[BaseException] = []

        def run() -> None:
            try:
                server.run()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive() and not failure, failure
            time.sleep(0.01)
        tiny = TinyServer(server, made)
        try:
            yield tiny
        finally:
            tiny.hang_up()
            server.handle_exit(15, None)
            thread.join(60)
            assert not thread.is_alive()
        assert not failure, failure
