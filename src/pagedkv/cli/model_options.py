"""What `generate` and `serve` are told alike: which model runs, and in which memory."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

MODEL, MEMORY = "Model", "Memory and batching"
"""The groups of these options in the help."""

RECORD_HELP = (
    "Write the run to this new file, for `pagedkv simulate --by-step`: no token, no text. "
    "Compressed where it ends in .gz or .zst."
)

Model: TypeAlias = Annotated[
    str,
    typer.Option(
        help="A Hugging Face id, a model's folder, or a GGUF file.", rich_help_panel=MODEL
    ),
]
GGUFFile: TypeAlias = Annotated[
    str | None,
    typer.Option(help="The GGUF file in that id or folder.", rich_help_panel=MODEL),
]
Dtype: TypeAlias = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16 or float16; auto is the model's own.",
        rich_help_panel=MODEL,
    ),
]
Device: TypeAlias = Annotated[
    str,
    typer.Option(
        help="auto, cpu, cuda or cuda:1; auto is a CUDA device where there is one.",
        rich_help_panel=MODEL,
    ),
]
Graphs: TypeAlias = Annotated[
    bool,
    typer.Option(help="On CUDA: replay decode steps as graphs.", rich_help_panel=MODEL),
]
KVMemory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Memory for keys and values, like 2GiB, or auto: all that is left.  [default: 1GiB]",
        rich_help_panel=MEMORY,
    ),
]
NumBlocks: TypeAlias = Annotated[
    int | None, typer.Option(help="The same in blocks.", rich_help_panel=MEMORY)
]
NumTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="The same in tokens.", rich_help_panel=MEMORY)
]
BlockSize: TypeAlias = Annotated[
    int, typer.Option(help="Tokens in a block.", rich_help_panel=MEMORY)
]
MaxModelLen: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Longest sequence, prompt and answer.  [default: the model's]",
        rich_help_panel=MEMORY,
    ),
]
MaxNumSeqs: TypeAlias = Annotated[
    int, typer.Option(help="Sequences that run at once.", rich_help_panel=MEMORY)
]
MaxNumBatchedTokens: TypeAlias = Annotated[
    int, typer.Option(help="Tokens of one step.", rich_help_panel=MEMORY)
]
PrefixCaching: TypeAlias = Annotated[
    bool,
    typer.Option(help="Share the blocks of equal prefixes.", rich_help_panel=MEMORY),
]
