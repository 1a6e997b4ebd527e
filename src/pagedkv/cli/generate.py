"""`pagedkv generate`: text from a model whose keys and values lie in blocks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from pagedkv.cli.announcing import say
from pagedkv.cli.extras import require_engine, require_structured
from pagedkv.cli.model_options import (
    MEMORY,
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

if TYPE_CHECKING:
    from pagedkv.engine.llm import Prompt
    from pagedkv.engine.outputs import BeamGeneration, Chunk
    from pagedkv.engine.statistics import EngineStatistics
    from pagedkv.engine.structured_output import StructuredOutput

_SAMPLING = "Sampling"
_STRUCTURE = "What an answer must be"


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts, each in quotes.", show_default=False)
    ] = None,
    model: Model = "",
    gguf_file: GGUFFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    graphs: Graphs = True,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A file with one prompt a line; - is standard input.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take prompts as they are, without a chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before each prompt of a chat.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answers alone.")] = False,
    max_tokens: Annotated[
        int, typer.Option(help="Tokens of an answer at most.", rich_help_panel=_SAMPLING)
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option(help="0 takes the likeliest token each time.", rich_help_panel=_SAMPLING),
    ] = 0.0,
    top_k: Annotated[
        int,
        typer.Option(help="Only this many likeliest tokens; 0: all.", rich_help_panel=_SAMPLING),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Only the likeliest tokens of this total probability.", rich_help_panel=_SAMPLING
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Only tokens this fraction as likely as the likeliest.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Above 1 avoids tokens already there.", rich_help_panel=_SAMPLING),
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that ends an answer; may be given again.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", "-n", help="Answers to each prompt.", rich_help_panel=_SAMPLING),
    ] = 1,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same answers.", rich_help_panel=_SAMPLING)
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(
            help="JSON of this schema: a file, or the schema itself.",
            rich_help_panel=_STRUCTURE,
        ),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            help="Text that this regular expression matches as a whole.",
            rich_help_panel=_STRUCTURE,
        ),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="One of these texts; give it once for each.", rich_help_panel=_STRUCTURE),
    ] = None,
    beams: Annotated[
        int | None,
        typer.Option(
            help="Search for the likeliest answer with this many beams; -n says how many of them "
            "to show.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="Of beams: above 0 favours long answers, below 0 short ones.  [default: 1.0]",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    kv_memory: KVMemory = None,
    num_blocks: NumBlocks = None,
    num_tokens: NumTokens = None,
    block_size: BlockSize = 16,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    prefix_caching: PrefixCaching = True,
    record: Annotated[
        Path | None,
        typer.Option(
            help=RECORD_HELP,
            rich_help_panel=MEMORY,
        ),
    ] = None,
) -> None:
    """Generate text with a model of transformers, its keys and values in blocks."""
    if not model:
        raise InvalidInput("no model: give --model with an id, a folder or a GGUF file")
    asked = list(prompts or []) + (_lines(prompts_file) if prompts_file is not None else [])
    if not asked:
        raise InvalidInput("no prompt: give one in quotes, or --prompts-file")
    require_engine()
    from pagedkv.engine.beam_search import BeamSearchParams
    from pagedkv.engine.llm import LLM
    from pagedkv.engine.sampling_params import SamplingParams

    structured = _structured(json_schema, regex, choice)
    params: SamplingParams | BeamSearchParams
    if beams is None:
        if length_penalty is not None:
            raise InvalidInput("--length-penalty is for beams: give --beams too")
        params = SamplingParams(
            n=samples,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop or (),
            seed=seed,
            structured=structured,
        )
    else:
        _refuse_beside_beams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p != 1.0,
            min_p=min_p,
            repetition_penalty=repetition_penalty != 1.0,
            stop=stop,
            seed=seed is not None,
            record=record,
            json_schema=json_schema is not None,
            regex=regex is not None,
            choice=choice,
        )
        if beams < 1:
            raise InvalidInput(f"--beams is {beams}: give at least 1")
        if not 1 <= samples <= beams:
            raise InvalidInput(f"-n is {samples}: --beams {beams} finds 1 to {beams} answers")
        params = BeamSearchParams(
            num_beams=beams,
            num_return_sequences=samples,
            max_tokens=max_tokens,
            length_penalty=1.0 if length_penalty is None else length_penalty,
        )
    announce = _silent if quiet else say
    announce(f"loading {model}")
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
        announce=announce,
    )
    is_chat = not raw and bool(getattr(llm.tokenizer, "chat_template", None))
    if system is not None and not is_chat:
        raise InvalidInput("--system is for chats, and these prompts are none")
    encoded: list[Prompt] = [_chat(text, system) if is_chat else text for text in asked]
    if isinstance(params, BeamSearchParams):
        _print_beams(asked, llm.beam_search(encoded, params), sys.stdout)
    else:
        shown = _InOrder(asked, samples, sys.stdout)
        llm.generate(encoded, params, on_chunk=shown.add)
    if not quiet:
        for line in statistics_lines(llm.statistics()):
            say(line)
    llm.close()


def statistics_lines(statistics: EngineStatistics) -> list[str]:
    """What a run did to the memory, as lines to read."""
    memory = statistics.memory
    outside = 1 - statistics.forward_s / statistics.step_s if statistics.step_s else 0.0
    return [
        f"{statistics.output_tokens:,} tokens in {statistics.step_s:.1f} s, "
        f"{statistics.output_tokens_per_s:.1f} tokens/s; {memory.num_steps:,} steps, "
        f"{outside:.1%} of their time outside the model",
        f"blocks: {memory.peak_used_blocks:,} of {memory.num_blocks:,} used at most, "
        f"at most {memory.peak_shared_blocks:,} shared, {memory.cached_blocks:,} cached now",
        f"prefix hits: {memory.hit_tokens:,} of {memory.query_tokens:,} prompt tokens "
        f"({memory.hit_rate:.1%}); waste: {memory.mean_waste:.1%} of the used slots; "
        f"preemptions: {memory.preemptions:,}",
    ]


def _structured(
    json_schema: str | None, regex: str | None, choice: list[str] | None
) -> StructuredOutput | None:
    """What the answers must be; None where any text will do."""
    from pagedkv.engine.structured_output import StructuredOutput

    given = {
        "--json-schema": json_schema is not None,
        "--regex": regex is not None,
        "--choice": bool(choice),
    }
    names = [name for name, is_given in given.items() if is_given]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidInput(f"{names[0]} and {names[1]} exclude each other: give one of them")
    require_structured()
    try:
        return StructuredOutput(
            json=None if json_schema is None else _schema(json_schema),
            regex=regex,
            choice=choice or None,
        )
    except InvalidInput as problem:
        raise InvalidInput(f"{names[0]}: {problem}") from None


def _schema(given: str) -> str:
    """A JSON schema that is given itself, or a file that it is in."""
    if given.lstrip().startswith("{"):
        return given
    if not given.strip():
        raise InvalidInput("it is empty: give a file, or the schema itself")
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as problem:
        raise InvalidInput(f"{given}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{given} is not UTF-8 text") from None


def _refuse_beside_beams(**options: object) -> None:
    """Raise `InvalidInput` if one of these options is given: beams are searched for without it."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise InvalidInput(f"--beams and {given[0]} exclude each other: give one of them")


def _print_beams(prompts: list[str], found: list[BeamGeneration], out: TextIO) -> None:
    """The best sequences of each prompt, best first."""
    is_titled = len(prompts) > 1 or any(len(generation.beams) > 1 for generation in found)
    for prompt, generation in zip(prompts, found):
        for beam in generation.beams:
            if is_titled:
                out.write(_title(prompt, f" (score {beam.score:.3f})"))
            out.write(f"{beam.text}\n")


def _title(prompt: str, behind: str) -> str:
    """A line that says which prompt is answered, as far as there is room."""
    line = " ".join(prompt.split())
    room = shutil.get_terminal_size().columns - len("── ") - len(behind)
    return f"── {line if len(line) <= room else line[: room - 1] + '…'}{behind}\n"


class _InOrder:
    """Prints answers in the order of their prompts, each as it comes once it is its turn."""

    def __init__(self, prompts: list[str], samples: int, out: TextIO) -> None:
        self._prompts = prompts
        self._samples = samples
        self._out = out
        self._texts = [[""] * samples for _ in prompts]
        self._ended = [[False] * samples for _ in prompts]
        self._turn = (0, 0)
        self._num_shown = 0
        self._is_titled = False

    def add(self, prompt: int, chunk: Chunk) -> None:
        self._texts[prompt][chunk.sample] += chunk.text
        # An interrupt aborts all: what was shown stays as it is, and nobody else has a turn.
        self._ended[prompt][chunk.sample] = chunk.finish_reason not in (None, "abort")
        while self._turn[0] < len(self._prompts):
            place, sample = self._turn
            text = self._texts[place][sample]
            if not self._is_titled and (text or self._ended[place][sample]):
                self._title(place, sample)
            self._out.write(text[self._num_shown :])
            self._num_shown = len(text)
            if not self._ended[place][sample]:
                break
            self._out.write("\n")
            self._num_shown, self._is_titled = 0, False
            self._turn = (place, sample + 1) if sample + 1 < self._samples else (place + 1, 0)
        self._out.flush()

    def _title(self, place: int, sample: int) -> None:
        """Which prompt an answer belongs to, where there are several."""
        self._is_titled = True
        if len(self._prompts) * self._samples > 1:
            number = f" (sample {sample + 1})" if self._samples > 1 else ""
            self._out.write(_title(self._prompts[place], number))


def _chat(text: str, system: str | None) -> list[dict[str, str]]:
    told = [] if system is None else [{"role": "system", "content": system}]
    return [*told, {"role": "user", "content": text}]


def _lines(file: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as problem:
        raise InvalidInput(f"--prompts-file: {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"--prompts-file: {file} is not UTF-8 text") from None
    return [line for line in text.splitlines() if line.strip()]


def _silent(line: str) -> None:
    pass
