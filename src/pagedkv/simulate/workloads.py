"""Built-in synthetic workloads: requests drawn from published length distributions.

Nothing is downloaded: each workload is a few numbers and the publication that they come from. The
same arguments give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from pagedkv.errors import InvalidInput
from pagedkv.simulate.trace import Trace

ARRIVALS = ("poisson", "bursty")
"""How requests arrive: independently of each other, or in bursts."""

BURSTY_CV = 3.0
"""Coefficient of variation (standard deviation over mean) of the time between bursty arrivals,
unless told otherwise. They are gamma distributed; 1 would be Poisson."""

MAX_REQUESTS = 20_000_000
"""More than this in one workload is taken for a slip of the keyboard."""

RATES_PER_S = (1e-6, 1e9)
"""The least and the most requests a second that a workload takes: times stay exact enough, and
finite, on both ends."""

_Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Workload:
    """A built-in workload, as `--workload` lists it.

    `mean_prompt_tokens` and `mean_output_tokens` are the published means that it is fitted to;
    None where there is no such figure. `source` says where every figure comes from.
    """

    name: str
    description: str
    source: str
    default_rate_per_s: float
    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    lengths: Callable[[Generator, int], _Lengths] | None
    """Draws prompt and output tokens of n independent requests; None where requests belong to
    conversations."""


def make_workload(
    name: str,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    arrivals: str = "poisson",
    burstiness_cv: float = BURSTY_CV,
    seed: int = 0,
) -> Trace:
    """Draw a workload: exactly one of `num_requests` and `duration_s` says how much of it.

    `rate_per_s` is the mean number of requests a second, the workload's own default unless given.
    `arrivals` "bursty" draws the times between arrivals from a gamma distribution whose
    coefficient of variation is `burstiness_cv` (of conversations, where there are any). The first
    request arrives at 0. Raises InvalidInput where an argument is out of its range.
    """
    if name not in WORKLOADS:
        raise InvalidInput(f"unknown workload {name!r}: choose from {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]
    rate = workload.default_rate_per_s if rate_per_s is None else rate_per_s
    least, most = RATES_PER_S
    if not least <= rate <= most:
        raise InvalidInput(
            f"a rate of {rate} requests a second: it must be from {least:g} to {most:g}"
        )
    if arrivals not in ARRIVALS:
        raise InvalidInput(f"unknown arrivals {arrivals!r}: choose from {', '.join(ARRIVALS)}")
    if not 0 < burstiness_cv <= 100:
        raise InvalidInput(f"a burstiness of {burstiness_cv}: it must be above 0 and at most 100")
    if seed < 0:
        raise InvalidInput(f"a seed of {seed}: it must be 0 or more")
    if (num_requests is None) == (duration_s is None):
        raise InvalidInput("give either a number of requests or a duration, not both or neither")
    if num_requests is not None and num_requests < 1:
        raise InvalidInput(f"{num_requests} requests: at least 1 is needed")
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise InvalidInput(f"a duration of {duration_s} s: it must be above 0")
    if (num_requests or 0) > MAX_REQUESTS or (duration_s or 0) * rate > MAX_REQUESTS:
        raise InvalidInput(f"more than {MAX_REQUESTS:,} requests: ask for fewer, or a lower rate")
    if workload.lengths is None and _CHAT_WARM_UP_S * rate > MAX_REQUESTS:
        raise InvalidInput(
            f"a rate of {rate:g} requests a second: the {_CHAT_WARM_UP_S:g} s of conversations "
            f"that come before {name} begins would be more than {MAX_REQUESTS:,} requests: give a "
            "lower rate"
        )

    cv = burstiness_cv if arrivals == "bursty" else 1.0
    rng = Generator(PCG64(seed))
    if workload.lengths is None:
        return _conversations(name, rng, num_requests, duration_s, rate, cv)
    arrival_s = _arrivals(rng, num_requests, duration_s, rate, cv)
    prompt, output = workload.lengths(rng, len(arrival_s))
    return Trace(
        name=name,
        format="synthetic",
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=output,
        session=np.full(len(arrival_s), -1, np.int64),
        prefix_ids=np.zeros(0, np.int64),
        prefix_offsets=np.zeros(len(arrival_s) + 1, np.int64),
    )


def _gaps(rng: Generator, n: int, rate: float, cv: float) -> NDArray[np.float64]:
    """`n` times between arrivals, seconds; a shape of 1 is the exponential distribution."""
    shape = 1.0 / cv**2
    return rng.gamma(shape, 1.0 / (rate * shape), n)


def _arrivals(
    rng: Generator, num_requests: int | None, duration_s: float | None, rate: float, cv: float
) -> NDArray[np.float64]:
    """Arrival times from 0 on: so many, or all that come before `duration_s`."""
    if num_requests is not None:
        return np.concatenate([[0.0], np.cumsum(_gaps(rng, num_requests - 1, rate, cv))])
    assert duration_s is not None
    chunks = [np.zeros(1)]
    while chunks[-1][-1] < duration_s:
        expected = max(16, int((duration_s - chunks[-1][-1]) * rate * 1.05))
        chunks.append(chunks[-1][-1] + np.cumsum(_gaps(rng, expected, rate, cv)))
    times = np.concatenate(chunks)
    return times[times < duration_s]


# Length distributions. Each returns whole tokens, int64 [n], at least 1.


def _lognormal(
    rng: Generator, n: int, *, median: float, sigma: float, low: int, high: int
) -> NDArray[np.int64]:
    drawn = np.rint(median * np.exp(sigma * rng.standard_normal(n)))
    return np.clip(drawn, low, high).astype(np.int64)


def _gamma_within(
    rng: Generator, shape: float, scale: float, limit: NDArray[np.int64]
) -> NDArray[np.int64]:
    """One plus a gamma variate rounded down, drawn again where it is above its `limit`.

    Drawing again rather than clipping: clipping would pile requests up at the limit.
    """
    tokens = 1 + rng.gamma(shape, scale, len(limit)).astype(np.int64)
    over = np.flatnonzero(tokens > limit)
    while len(over):
        tokens[over] = 1 + rng.gamma(shape, scale, len(over)).astype(np.int64)
        over = over[tokens[over] > limit[over]]
    return tokens


def _from_quantiles(
    rng: Generator, n: int, probability: NDArray[np.float64], tokens: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Draw by the inverse distribution function, linear between the quantiles given."""
    return np.rint(np.interp(rng.random(n), probability, tokens)).astype(np.int64)


_MAX_LENGTH = 2048  # prompt and output together, in the PagedAttention paper's setting


def _sharegpt(rng: Generator, n: int) -> _Lengths:
    # Means as published. The spread of the output is what the paper's own figures ask for: a
    # request caught at a random moment has on average E[o^2]/(2 E[o]) = 299 tokens behind it.
    prompt = _lognormal(rng, n, median=78.138, sigma=1.3, low=4, high=1024)
    return prompt, _gamma_within(rng, 1.22, 280.9, _MAX_LENGTH - prompt)


def _alpaca(rng: Generator, n: int) -> _Lengths:
    # Means as in the PagedAttention paper; the spread (standard deviation 15.19 of 19.67 and
    # 64.85 of 64.51) as in published statistics of the data set.
    prompt = _lognormal(rng, n, median=15.260, sigma=0.6837, low=4, high=1024)
    return prompt, _gamma_within(rng, 0.99, 58.49, _MAX_LENGTH - prompt)


# Quantiles of the Azure 2023 traces, rounded to whole tokens (data: CC-BY 4.0).
# fmt: off
_PROBABILITY = np.array([
    0, .01, .05, .1, .2, .25, .3, .35, .4, .5, .55, .6, .7, .75, .8, .85, .9, .925, .95, .965,
    .98, .99, .995, .998, .999, .9997, 1])
_CONVERSATION_PROMPT = np.array([
    2, 29, 181, 207, 387, 396, 403, 414, 703, 1020, 1045, 1071, 1130, 1189, 1315, 1876, 2734,
    4075, 4083, 4088, 4098, 4142, 4831, 5652, 6179, 7096, 14050], np.float64)
_CONVERSATION_OUTPUT = np.array([
    7, 16, 41, 54, 77, 85, 91, 96, 103, 129, 151, 177, 384, 395, 400, 411, 424, 430, 451, 490,
    540, 601, 643, 917, 954, 1000, 1000], np.float64)
_CODE_PROMPT = np.array([
    3, 17, 75, 147, 386, 578, 770, 939, 1075, 1469, 1690, 1909, 2433, 2744, 3192, 3920, 5188,
    6097, 7303, 7435, 7436, 7436, 7436, 7436, 7437, 7437, 7437], np.float64)
_CODE_OUTPUT = np.array([
    6, 6, 6, 7, 8, 9, 9, 10, 11, 13, 14, 16, 20, 24, 29, 39, 55, 69, 90, 115, 171, 251, 359, 670,
    825, 932, 1899], np.float64)
# fmt: on


def _azure_conversation(rng: Generator, n: int) -> _Lengths:
    prompt = _from_quantiles(rng, n, _PROBABILITY, _CONVERSATION_PROMPT)
    return prompt, _from_quantiles(rng, n, _PROBABILITY, _CONVERSATION_OUTPUT)


def _azure_code(rng: Generator, n: int) -> _Lengths:
    prompt = _from_quantiles(rng, n, _PROBABILITY, _CODE_PROMPT)
    return prompt, _from_quantiles(rng, n, _PROBABILITY, _CODE_OUTPUT)


# Conversations with several turns. The prompt of a turn is all that came before, and the new
# message:
#
#   tokens   [0, 512)          [512, ...)
#            system prompt     message 1   answer 1   message 2   answer 2   message 3
#   turn 1   |-------------------------|
#   turn 2   |-----------------------------------------------|
#   turn 3   |---------------------------------------------------------------------|

CHAT_GRANULARITY = 16
"""Tokens for each prefix id of the `chat` workload."""

CHAT_SYSTEM_TOKENS = 512
"""Length of the system prompt that all conversations of `chat` begin with (an assumption)."""

CHAT_MAX_TOKENS = 8192
"""A conversation of `chat` ends before prompt and output of a turn would exceed this."""

_CHAT_MEAN_TURNS = 3.51
_CHAT_THINK_S = 30.0  # mean time for which a user reads and writes, exponential (an assumption)
_CHAT_TOKEN_S = 0.02  # how fast answers appear, so that no turn follows before its answer ends
_CHAT_WARM_UP_S = 900.0  # 15 turns at this pace: by then as many conversations end as begin


def _conversations(
    name: str,
    rng: Generator,
    num_requests: int | None,
    duration_s: float | None,
    rate: float,
    cv: float,
) -> Trace:
    """A window of an endless stream of conversations, some of them under way when it opens."""
    span_s = duration_s if duration_s is not None else (num_requests or 0) / rate
    expected = (span_s + _CHAT_WARM_UP_S) * rate / _CHAT_MEAN_TURNS
    enough = int(1.2 * expected + 6 * cv * math.sqrt(expected)) + 16
    while True:
        turns = _draw_turns(rng, enough, rate, cv)
        # Nothing is missing before the last conversation's beginning; what is later may be.
        whole = turns.arrival_s < turns.last_start_s
        late = np.flatnonzero(whole & (turns.arrival_s >= _CHAT_WARM_UP_S))
        order = late[np.argsort(turns.arrival_s[late], kind="stable")]
        if num_requests is not None and len(order) >= num_requests:
            order = order[:num_requests]
            break
        opened_s = turns.arrival_s[order[0]] if len(order) else math.inf
        if duration_s is not None and opened_s + duration_s <= turns.last_start_s:
            order = order[turns.arrival_s[order] - opened_s < duration_s]
            break
        enough *= 2  # rare: an unlucky burst made the stream too short
    arrival_s = turns.arrival_s[order]
    prompt = turns.prompt[order]
    ids, offsets = _chat_ids(turns, order)
    return Trace(
        name=name,
        format="synthetic",
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=prompt,
        output_tokens=turns.output[order],
        session=turns.conversation[order],
        prefix_ids=ids,
        prefix_offsets=offsets,
        granularity=CHAT_GRANULARITY,
    )


@dataclass(frozen=True)
class _Turns:
    """Every turn of every conversation, in order of conversation: columns of length n.

    `arrival_s` float64, the others int64; `last_start_s`: when the last conversation begins.
    """

    arrival_s: NDArray[np.float64]
    conversation: NDArray[np.int64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    last_start_s: float


def _draw_turns(rng: Generator, conversations: int, rate: float, cv: float) -> _Turns:
    num_turns = rng.geometric(1 / _CHAT_MEAN_TURNS, conversations)
    conversation = np.repeat(np.arange(conversations), num_turns)
    first = np.cumsum(num_turns) - num_turns  # row of each conversation's first turn
    n = len(conversation)
    message = _lognormal(rng, n, median=46.317, sigma=1.2, low=2, high=2048)
    output = _gamma_within(rng, 1.668, 208.6, np.full(n, 2048))
    grown = np.cumsum(message + output)
    before = grown - (message + output)
    prompt = CHAT_SYSTEM_TOKENS + before - before[first][conversation] + message

    answered_s = output * _CHAT_TOKEN_S + rng.exponential(_CHAT_THINK_S, n)
    waited_s = np.cumsum(answered_s) - answered_s
    waited_s -= waited_s[first][conversation]
    # Prompts only grow, so what is dropped is the tail of a conversation.
    fits = prompt + output <= CHAT_MAX_TOKENS
    fits[first] = True  # a first turn always does: 512 + 2048 + 2048
    start_s = np.cumsum(_gaps(rng, conversations, rate * conversations / fits.sum(), cv))
    return _Turns(
        arrival_s=(start_s[conversation] + waited_s)[fits],
        conversation=conversation[fits],
        prompt=prompt[fits],
        output=output[fits],
        last_start_s=float(start_s[-1]),
    )


def _chat_ids(
    turns: _Turns, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prefix ids of the turns `rows`: shared in the system prompt, then each conversation's own.

    A last id for fewer tokens than a whole one is nobody else's: the next turn finds those tokens
    followed by others.
    """
    per_id = CHAT_GRANULARITY
    prompt, conversation = turns.prompt[rows], turns.conversation[rows]
    counts = -(-prompt // per_id)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    index = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    shared = CHAT_SYSTEM_TOKENS // per_id
    span = CHAT_MAX_TOKENS // per_id
    own = np.repeat(conversation + 1, counts) * span + index
    ids = np.where(index < shared, index, own)
    partial = np.flatnonzero(prompt % per_id)
    beyond = (int(conversation.max()) + 2) * span
    ids[offsets[1:][partial] - 1] = beyond + np.arange(len(partial))
    return ids, offsets


_PAPER = "Kwon et al., PagedAttention, SOSP 2023"
_AZURE = "Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024; CC-BY 4.0)"

WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            "chat",
            "conversations of several turns after one system prompt: prefixes are shared",
            "turns and lengths of messages: ShareGPT as described by Zhao et al., WildChat, ICLR "
            "2024 (3.51 turns; 94.46 tokens a message; 348.45 +/- 269.93 an answer); system "
            "prompt, pauses and longest context are assumptions",
            6.0,
            None,
            348.45,
            None,
        ),
        Workload(
            "sharegpt",
            "single requests with the lengths of ShareGPT: long answers, very different ones",
            f"{_PAPER}: mean 161.31 prompt and 337.99 output tokens, at most 2,048 together; the "
            "spread of outputs from the memory its figures 2 and 13 imply",
            2.0,
            161.31,
            337.99,
            _sharegpt,
        ),
        Workload(
            "alpaca",
            "single requests with the lengths of Alpaca: short instructions, short answers",
            f"{_PAPER}: mean 19.31 prompt and 58.45 output tokens; spread: Zhao et al., WildChat",
            30.0,
            19.31,
            58.45,
            _alpaca,
        ),
        Workload(
            "azure-conversation",
            "chat requests to a cloud service: long prompts, answers of two kinds",
            f"{_AZURE}: quantiles of the conversation trace (mean 1,155 and 211)",
            5.5,
            1154.70,
            211.13,
            _azure_conversation,
        ),
        Workload(
            "azure-code",
            "code completion in a cloud service: very long prompts, a few tokens out",
            f"{_AZURE}: quantiles of the code trace (mean 2,048 and 28)",
            2.6,
            2047.85,
            27.88,
            _azure_code,
        ),
    )
}
"""Every built-in workload by name."""
