"""`pagedkv serve`: a model over HTTP, for the clients of OpenAI's API."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli.announcing import say
from pagedkv.cli.extras import require_engine, require_server
from pagedkv.cli.model_options import (
    MODEL,
    RECORD_HELP,
    BlockSize,
    Device,
    Dtype,
    GGUFFile,
    Graphs,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    NumBlocks,
    NumTokens,
    PrefixCaching,
)
from pagedkv.errors import InvalidInput

_SERVER, _LIMITS = "Server", "Limits"


def serve(
    model: Model = "",
    gguf_file: GGUFFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    graphs: Graphs = True,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model.  [default: --model as given]",
            rich_help_panel=MODEL,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; 0.0.0.0 lets other machines in.", rich_help_panel=_SERVER
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65_535, help="0 takes any free one.", rich_help_panel=_SERVER),
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PAGEDKV_API_KEY",
            help="What clients must show; may be given again.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Whose pages may use it from a browser, like https://example.org, or * for all; "
            "may be given again.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log",
            help="A line for each request on stdout: id, status, tokens, duration, never text.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            help="After SIGTERM, time for answers to be finished.",
            rich_help_panel=_SERVER,
        ),
    ] = 25.0,
    record: Annotated[
        Path | None,
        typer.Option(
            help=RECORD_HELP,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option(help="Sequences that wait; past it 429.", rich_help_panel=_LIMITS),
    ] = 1_024,
    max_streams: Annotated[
        int, typer.Option(help="Open streams; past it 429.", rich_help_panel=_LIMITS)
    ] = 1_024,
    max_answers: Annotated[
        int,
        typer.Option(
            help="Answers to a request: prompts times n; past it 400.", rich_help_panel=_LIMITS
        ),
    ] = 128,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt; past it 400.  [default: what the model takes]",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Bytes of a request; past it 413.", rich_help_panel=_LIMITS)
    ] = 4 << 20,
    max_connections: Annotated[
        int, typer.Option(help="Open connections; past it 503.", rich_help_panel=_LIMITS)
    ] = 4_096,
    kv_memory: KVMemory = None,
    num_blocks: NumBlocks = None,
    num_tokens: NumTokens = None,
    block_size: BlockSize = 16,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    prefix_caching: PrefixCaching = True,
) -> None:
    """Serve a model to the clients of OpenAI's API, its keys and values in blocks."""
    if not model:
        raise InvalidInput("no model: give --model with an id, a folder or a GGUF file")
    _check_keys(api_key or ())
    require_engine()
    require_server()
    say("starting: torch and transformers")
    from pagedkv.engine.llm import LLM
    from pagedkv.server.cross_origin import check_origin
    from pagedkv.server.lifecycle import Server, listen
    from pagedkv.server.limits import ServerLimits
    from pagedkv.server.serving import Serving

    limits = ServerLimits(
        max_waiting=max_waiting,
        max_streams=max_streams,
        max_answers=max_answers,
        max_prompt_tokens=max_prompt_tokens,
        max_body_bytes=max_body_bytes,
        max_connections=max_connections,
    )
    # Before the model is loaded, which takes long.
    for origin in allow_origin or ():
        check_origin(origin)
    with listen(host, port) as listener:
        say(f"loading {model}")
        llm = LLM(
            model,
            gguf_file=gguf_file,
            device=device,
            dtype=dtype,
            graphs=graphs,
            kv_memory=kv_memory,
            num_blocks=num_blocks,
            num_tokens=num_tokens,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
            record=record,
            announce=say,
        )
        with llm:
            serving = Serving(llm, model_name=served_model_name or model, limits=limits)
            server = Server(
                serving,
                listener=listener,
                api_keys=tuple(api_key or ()),
                allow_origins=tuple(allow_origin or ()),
                drain_s=drain_seconds,
                announce=say,
                access_log=typer.echo if access_log else None,
            )
            with _kept():
                server.run()


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Let the collector of garbage pass over what was loaded, which stays as long as the server.

    torch and transformers are some 400,000 objects, and to look through them all takes a third of
    a second, in which nobody is answered: a body of 700,000 lists made that happen four times.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_keys(keys: Sequence[str]) -> None:
    """Raise `InvalidInput` for a key that everybody has, or that nobody could show."""
    # Typer takes an empty variable for one that is not there, and the server would be open.
    if not keys and "PAGEDKV_API_KEY" in os.environ:
        raise InvalidInput("PAGEDKV_API_KEY is empty, which everybody has: set it, or unset it")
    for key in keys:
        if not key:
            raise InvalidInput(
                "--api-key is empty, which everybody has: give a key, or none at all"
            )
        if key != key.strip():
            raise InvalidInput("--api-key begins or ends with a space, which no client can show")
