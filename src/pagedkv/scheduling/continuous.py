"""Continuous scheduling: sequences arrive, end and are cancelled while others run.

The decisions are those of `scheduler`, the compiled functions that the simulator calls. What is
added here is what a simulation knows beforehand and an engine does not: who comes when, what the
next token is, and when an answer ends. A step is one round of

1. `schedule`: who computes what, with the arrays that a model and its attention take as they are;
2. the model runs, and somebody chooses a token for each sequence that is due one;
3. `commit`: those tokens are known from now on, and the blocks that the step filled can be found;
4. where there are beam searches: `branch`, for each whose beams have all been computed.

On a device that runs by itself the next step can be decided while one runs: `schedule_ahead`
between 1 and 3. It counts the tokens that the running step brings before they are known; its
batch says where they go. Then `commit` is for the older of the two.

A sequence is a column of arrays. Columns are recycled, and so is the room for its token ids and
the keys of its blocks, which lie in one region of `blocks_for(longest)` blocks::

    token_ids   [ ─── region of column 4 ─── | ── of column 0 ── |  free  ]   block_size a block
    keys        [ ─── region of column 4 ─── | ── of column 0 ── |  free  ]   one a block
                  └ first_key[4]
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.errors import BrokenLaw, InvalidInput, NeverFits, UnknownSequence
from pagedkv.memory import allocation, arguments, laws
from pagedkv.memory.address import write_slots
from pagedkv.memory.allocation import Memory, make_memory
from pagedkv.memory.block_key import MAX_TOKEN_ID, Namespace, block_key, root_key
from pagedkv.memory.block_table import FREE_ROW, NO_BLOCK, blocks_for
from pagedkv.memory.blocks import CACHED, EVICTED, FREE
from pagedkv.scheduling import queues as queue
from pagedkv.scheduling import scheduler
from pagedkv.scheduling.limits import Limits, SchedulerConfig
from pagedkv.scheduling.queues import (
    EXPECTED,
    RUNNING,
    RUNNING_SIZE,
    WAITING_HEAD,
    WAITING_SIZE,
    Queues,
    Sequences,
    make_queues,
    make_sequences,
)
from pagedkv.scheduling.scheduler import (
    ADMITTED,
    COPIES,
    FORKED,
    PREEMPTED,
    SCHEDULED,
    Plan,
    make_plan,
)

CHOSEN_LATER = -1
"""What a beam that is due a token says: `Scheduler.branch` tells it, when all beams are as far.
And what stands for a token that the step before is about to bring."""

_NO_SEARCH = -1

COLUMNS = 1 << 24
"""More columns than there can be; a sequence's number modulo this is its column."""


class Batch(NamedTuple):
    """One step's work: n sequences compute T tokens together, and k tokens are chosen after it."""

    sequences: NDArray[np.int64]
    """[n]: the number of each sequence that computes."""
    token_ids: NDArray[np.int64]
    """[T]: the tokens to compute, sequence after sequence; `CHOSEN_LATER` where `awaited` tells."""
    positions: NDArray[np.int64]
    """[T]: the place of each in its sequence."""
    slots: NDArray[np.int64]
    """[T]: where the keys and values of each go."""
    block_tables: NDArray[np.int32]
    """[n, widest]: each sequence's block table, -1 behind its end."""
    lengths: NDArray[np.int64]
    """[n]: tokens of each sequence once these are computed."""
    query_starts: NDArray[np.int64]
    """[n + 1]: sequence i computes tokens `query_starts[i]` to `query_starts[i + 1]`, half open."""
    copies: NDArray[np.int32]
    """[m, 2]: (from, to) of each block to copy, in this order, before anything is written."""
    due: NDArray[np.int64]
    """[k]: the number of each sequence whose next token can be chosen after this step."""
    due_rows: NDArray[np.int64]
    """[k]: the place in the batch of the token whose logits choose it; forks share one."""
    admitted: NDArray[np.int64]
    """Sequences that began or began again in this step."""
    num_cached: NDArray[np.int64]
    """Tokens that each admitted sequence found in the cache."""
    preempted: NDArray[np.int64]
    """Sequences that gave way, and wait to be computed again."""
    awaited: NDArray[np.int64]
    """[u, 2]: (place in `token_ids`, place in `due` of the step before) of each token that the
    step before chooses while this one is decided; none unless it was scheduled ahead."""


@dataclass(eq=False)
class _Step:
    """A step under way."""

    plan: Plan
    batch: Batch
    due: NDArray[np.int64]
    """[k]: the columns of `batch.due`."""
    generation: NDArray[np.int64]
    """[columns]: that of each column when it was scheduled; another one has ended since."""


@dataclass(frozen=True)
class SchedulerStatistics:
    """What the memory holds now, and what happened since the start."""

    num_blocks: int
    block_size: int
    used_blocks: int
    shared_blocks: int
    """Of the used ones, those that several sequences share."""
    cached_blocks: int
    free_blocks: int
    table_entries: int
    """Blocks that the running sequences would need without sharing."""
    held_tokens: int
    """Slots of used blocks that hold a token."""
    num_running: int
    num_waiting: int
    num_steps: int
    computed_tokens: int
    query_tokens: int
    """Tokens of all sequences when they were first admitted, which could have been cached."""
    hit_tokens: int
    """Of those, the ones that were."""
    preemptions: int
    recomputed_tokens: int
    evicted_blocks: int
    peak_used_blocks: int
    peak_shared_blocks: int
    peak_running: int
    mean_waste: float
    """Share of the slots in used blocks that held no token, over all steps."""

    @property
    def hit_rate(self) -> float:
        """Share of the tokens admitted that were cached; 0 before anything was admitted."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    @property
    def waste(self) -> float:
        """Share of the slots in used blocks that hold no token; 0 while none is used."""
        slots = self.used_blocks * self.block_size
        return 1.0 - self.held_tokens / slots if slots else 0.0


class SchedulerArrays(NamedTuple):
    """The arrays of a `Scheduler` themselves, for whoever looks on and changes nothing."""

    memory: Memory
    sequences: Sequences
    queues: Queues
    plan: Plan
    """The newest step with what came of it: not one that was scheduled ahead and still runs."""
    is_alive: NDArray[np.bool_]
    """Of each column of `sequences`, whether it is somebody's."""
    generation: NDArray[np.int64]
    """Of each column, how many sequences had it before."""


class Scheduler:
    """Sequences on a memory: who computes what in each step, and where it goes.

    >>> config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, watermark=0.0)
    >>> scheduler = Scheduler(8, config, block_size=4, max_model_len=32)
    >>> [a] = scheduler.add([11, 12, 13, 14, 15], max_new_tokens=2)
    >>> batch = scheduler.schedule()
    >>> batch.slots.tolist(), batch.due.tolist() == [a], batch.due_rows.tolist()
    ([0, 1, 2, 3, 4], True, [4])
    >>> scheduler.commit([16])
    >>> batch = scheduler.schedule()
    >>> batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist()
    ([16], [5], [5])
    >>> scheduler.commit([17])
    >>> scheduler.finish([a])

    `num_blocks` blocks of `block_size` tokens; no sequence has more than `max_model_len` tokens,
    prompt and answer. With `prefix_caching` full blocks are found again by their content;
    `secret` (16 bytes, random unless given) keys the hash.

    Not thread-safe: one thread at a time. Raises `InvalidInput` for values out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        config: SchedulerConfig,
        *,
        block_size: int = 16,
        max_model_len: int,
        prefix_caching: bool = True,
        secret: bytes | None = None,
    ) -> None:
        num_blocks = arguments.as_count("num_blocks", num_blocks, 1, arguments.MAX_BLOCKS)
        block_size = arguments.as_count("block_size", block_size, 1, arguments.MAX_BLOCK_SIZE)
        max_model_len = arguments.as_count("max_model_len", max_model_len, 1, arguments.MAX_TOKENS)
        secret = os.urandom(16) if secret is None else arguments.as_secret(secret)
        self.config = config
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.prefix_caching = prefix_caching
        self._limits = config.limits(num_blocks=num_blocks, block_size=block_size)
        self._secret = np.frombuffer(secret, dtype="<u8").astype(np.uint64)
        self._root = root_key(self._secret, {})
        width = min(blocks_for(max_model_len, block_size), num_blocks)
        seats = config.max_num_seqs
        self._memory: Memory = make_memory(num_blocks, seats, width | 1)
        # One of the step that runs, one of the step that is decided meanwhile.
        self._plans: list[Plan] = [make_plan(seats, width | 1) for _ in range(2)]
        self._newest = self._plans[0]
        self._under_way: list[_Step] = []
        none = np.zeros(0, dtype=np.int64)
        self._sequences: Sequences = make_sequences(none, none)
        self._queues: Queues = make_queues(1, seats)
        self._token_ids = np.zeros(0, dtype=np.int64)
        self._roots = np.zeros((0, 2), dtype=np.uint64)
        self._keyed = np.zeros(0, dtype=np.bool_)
        self._alive = np.zeros(0, dtype=np.bool_)
        self._generation = np.zeros(0, dtype=np.int64)
        self._search = np.zeros(0, dtype=np.int64)  # its first column; of a beam
        self._beams: dict[int, list[int]] = {}  # of a search, in their order
        self._region_blocks = np.zeros(0, dtype=np.int64)
        self._lost = np.zeros(0, dtype=np.int64)
        self._regions_end = 0
        self._doomed: set[int] = set()
        self._totals = dict.fromkeys(
            ("steps", "computed", "queries", "hits", "preemptions", "recomputed"), 0
        )
        self._peak_used = 0
        self._peak_shared = 0
        self._peak_running = 0
        self._used_slots = 0
        self._empty_slots = 0

    @property
    def num_blocks(self) -> int:
        """All physical blocks."""
        return len(self._memory.pool.ref_count)

    @property
    def num_running(self) -> int:
        """Sequences that have blocks."""
        return int(self._queues.counters[RUNNING_SIZE])

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks or for a seat."""
        return int(self._queues.counters[WAITING_SIZE])

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to schedule, and no step under way."""
        return self.num_running == 0 and self.num_waiting == 0 and not self._under_way

    @property
    def num_steps(self) -> int:
        """Steps scheduled so far."""
        return self._totals["steps"]

    @property
    def num_concluded(self) -> int:
        """Of these, the ones that were committed or abandoned."""
        return self.num_steps - len(self._under_way)

    @property
    def newest_plan(self) -> Plan:
        """`arrays.plan`, for who asks at every step."""
        return self._newest

    @property
    def arrays(self) -> SchedulerArrays:
        """All state, not copied; to be read between two steps, and asked for anew each time."""
        return SchedulerArrays(
            self._memory,
            self._sequences,
            self._queues,
            self._newest,
            self._alive,
            self._generation,
        )

    def add(
        self,
        token_ids: ArrayLike,
        *,
        max_new_tokens: int,
        num_samples: int = 1,
        namespace: Namespace | None = None,
        reuse: bool = True,
        name: str = "",
    ) -> list[int]:
        """A request arrives: a prompt, and `num_samples` answers of up to `max_new_tokens` tokens.

        Returns the number of each sample's sequence. The first computes the prompt; the others
        fork from it and share all of its blocks. `namespace` names what besides the tokens
        changes K and V. Without `reuse` the prompt is computed whole, and nothing of it is
        cached, for those who need every logit. `name` is what an error calls the request.

        Raises `NeverFits` for a request that needs more blocks than the memory has; nothing can
        help it. Raises `InvalidInput` for no tokens, token ids out of range, more tokens than
        `max_model_len`, or more samples than `max_num_seqs`.
        """
        ids = self._checked_ids(token_ids)
        first = self._arrive(ids, max_new_tokens, num_samples, "samples", namespace, reuse, name)
        columns = np.arange(first, first + num_samples, dtype=np.int64)
        return [int(number) for number in self._numbers(columns)]

    def add_search(
        self,
        token_ids: ArrayLike,
        *,
        max_new_tokens: int,
        num_beams: int,
        namespace: Namespace | None = None,
        name: str = "",
    ) -> int:
        """A beam search arrives: a prompt, and up to `num_beams` beams of it that go on together.

        Returns the number of its first beam, which computes the prompt. A beam that is due says
        `CHOSEN_LATER` in `commit`, and is held; when all are, `branch` says how they go on.

        Raises what `add` raises. One beam must fit into the memory: those that do not fit beside
        others are computed after them.
        """
        ids = self._checked_ids(token_ids)
        first = self._arrive(ids, max_new_tokens, num_beams, "beams", namespace, True, name)
        columns = slice(first, first + num_beams)
        self._sequences.is_beam[columns] = True
        self._search[columns] = first
        self._beams[first] = [first]
        return int(self._numbers(np.array([first]))[0])

    def branch(self, beams: Iterable[int], parents: ArrayLike, token_ids: ArrayLike) -> list[int]:
        """The beams of a search go on: the i-th of those to come goes on from
        `beams[parents[i]]` with the token `token_ids[i]`, int64 [m] both.

        `beams`: all of the search, in any order. One that nobody goes on from ends, and its
        blocks come back; one from which several go on is forked, and they share its blocks until
        they write. Returns the numbers of the beams to come.

        Raises `UnknownSequence`, or `InvalidInput` within a step, for beams that are not all of
        one search or not all computed, and for too many to come; then nothing is changed.
        """
        columns = [self._column(s) for s in beams]
        come_from = arguments.as_integers("parents", parents)
        said = arguments.as_integers("token ids", token_ids)
        self._check_branching(columns, come_from, said)
        search = int(self._search[columns[0]])
        num_places = 1 + int(self._sequences.num_followers[search])
        next_columns = np.empty(len(come_from), dtype=np.int64)
        _branch(
            self._memory,
            self._sequences,
            self._queues,
            self._limits,
            self._secret,
            self._roots,
            self._keyed,
            self._token_ids,
            np.array(columns, dtype=np.int64),
            come_from,
            search,
            np.empty(num_places, dtype=np.bool_),
            said,
            next_columns,
        )
        chosen = next_columns.tolist()
        named = {columns[parent] for parent in come_from.tolist()}
        for s in columns:
            if s not in named:  # if another beam has its place, it has another number
                self._generation[s] += 1
                self._lost[s] = 0
        self._beams[search] = chosen
        return [int(number) for number in self._numbers(next_columns)]

    def _check_branching(
        self, columns: list[int], parents: NDArray[np.int64], said: NDArray[np.int64]
    ) -> None:
        if self._under_way:
            raise InvalidInput("a step is under way: beams go on between two steps")
        search = int(self._search[columns[0]]) if columns else _NO_SEARCH
        if search == _NO_SEARCH or sorted(columns) != sorted(self._beams[search]):
            raise InvalidInput("these are not all beams of one search")
        sequences, tables = self._sequences, self._memory.tables
        for s in columns:
            row = int(sequences.row[s])
            is_computed = row >= 0 and tables.num_computed[row] == sequences.num_tokens[s]
            if sequences.state[s] != EXPECTED and not is_computed:
                raise InvalidInput("not all beams of this search are computed yet")
        most = 1 + int(sequences.num_followers[search])
        if not 1 <= len(parents) == len(said) <= most:
            raise InvalidInput(
                f"{len(parents)} parents and {len(said)} tokens: give as many of each, 1 to {most}"
            )
        if int(parents.min()) < 0 or int(parents.max()) >= len(columns):
            raise InvalidInput(f"a parent is not 0 to {len(columns) - 1}")
        if int(said.min()) < 0 or int(said.max()) > MAX_TOKEN_ID:
            raise InvalidInput(f"a token id is not 0 to {MAX_TOKEN_ID}")
        if int(sequences.num_tokens[columns[0]]) + 1 > int(sequences.total_tokens[columns[0]]):
            raise InvalidInput("these beams have all of their tokens: finish them")

    def _arrive(
        self,
        ids: NDArray[np.int64],
        max_new_tokens: int,
        count: int,
        of_what: str,
        namespace: Namespace | None,
        reuse: bool,
        name: str,
    ) -> int:
        """Fill `count` columns in a row for a request; returns the first. See `add`."""
        name = name or "with " + f"{len(ids)} prompt tokens"
        max_new_tokens = arguments.as_integer("max_new_tokens", max_new_tokens)
        count = arguments.as_integer(f"the number of {of_what}", count)
        if max_new_tokens < 1 or count < 1:
            raise InvalidInput(
                f"request {name} asks for {max_new_tokens} new tokens and {count} {of_what}: "
                "give at least 1 of each"
            )
        total = len(ids) + max_new_tokens
        if total > self.max_model_len:
            raise InvalidInput(
                f"request {name}: {len(ids)} prompt tokens and {max_new_tokens} new ones are more "
                f"than the model's maximum, {self.max_model_len}"
            )
        if count > self.config.max_num_seqs:
            raise InvalidInput(
                f"request {name} asks for {count} {of_what}, which run at once, but "
                f"max_num_seqs is {self.config.max_num_seqs}"
            )
        # The last token is never computed: its K and V are needed by nobody.
        needed = blocks_for(total - 1, self.block_size)
        if needed > self.num_blocks:
            raise NeverFits(request=name, needed=needed, capacity=self.num_blocks)
        root = self._root if namespace is None else root_key(self._secret, namespace)
        first = self._take_columns(count)
        self._make_regions(first, count, blocks_for(total, self.block_size))
        _arrive(
            self._sequences,
            self._queues,
            self._token_ids,
            self._roots,
            self._keyed,
            self._secret,
            root,
            ids,
            first,
            count,
            total,
            self.block_size,
            bool(self.prefix_caching and reuse),
        )
        return first

    def schedule(self) -> Batch:
        """Decide the next step; its blocks are taken, and what it will write is in the `Batch`.

        Empty if nobody can compute. Raises `InvalidInput` if a step is under way, or where a
        sequence has all of its tokens and was not finished.
        """
        if self._under_way:
            raise InvalidInput("a step is under way: commit or abandon it first")
        self._check_unfinished()
        plan = self._plans[0]
        scheduler.schedule(self._memory, self._sequences, self._queues, plan, self._limits)
        self._newest = plan
        return self._begin(plan)

    def schedule_ahead(self) -> Batch | None:
        """Decide the step after the one that runs, whose tokens are not known yet.

        They are taken to be there: `Batch.awaited` says where each belongs. Who ends with the
        running step computes one token more than is wanted, unless all its tokens are due by then.

        Blocks that came back while the running step was under way may be in this one. What the
        running step writes there, it writes before: steps are to run in the order in which they
        were scheduled.

        None, and nothing is decided, where it is better to wait: for beams, which choose
        together; where somebody would have to give way; where nobody can compute.

        Raises `InvalidInput` unless exactly one step is under way, or where a sequence has all of
        its tokens and was not finished.
        """
        if len(self._under_way) != 1:
            raise InvalidInput(f"{len(self._under_way)} steps are under way: this is for one")
        if self._beams:
            return None
        doomed, self._doomed = sorted(self._doomed), set()
        self._end(doomed)
        self._check_unfinished()
        running = self._under_way[0]
        self._forget_ended(running)
        plan, sequences, queues = running.plan, self._sequences, self._queues
        scheduler.anticipate(self._memory, sequences, queues, plan)
        count = int(plan.counters[SCHEDULED])
        who = plan.sequence[:count][plan.is_anticipated[:count]]
        self._await_tokens(np.concatenate([who, plan.forked[: plan.counters[FORKED]]]))
        if self._doomed:  # samples that nobody wants, which had to be forked first
            doomed, self._doomed = sorted(self._doomed), set()
            self._end(doomed)
            self._forget_ended(running)
        block_size = self.block_size
        if not scheduler.has_room_ahead(self._memory, sequences, queues, block_size):
            return None
        plan = self._plans[1]
        scheduler.schedule(self._memory, sequences, queues, plan, self._limits)
        if plan.counters[SCHEDULED] == 0:
            return None
        return self._begin(plan)

    def _check_unfinished(self) -> None:
        """Nobody who runs has all tokens: there is no room to write down another."""
        sequences, queues = self._sequences, self._queues
        running = queues.running[: queues.counters[RUNNING_SIZE]]
        is_full = sequences.num_tokens[running] >= sequences.total_tokens[running]
        if not is_full.any():
            return
        full = running[is_full & ~sequences.is_beam[running]]  # beams are looked at in `branch`
        if len(full):
            raise InvalidInput(
                f"sequence {self._numbers(full)[0]} has all of its "
                f"{sequences.total_tokens[full[0]]} tokens: finish it before the next step"
            )

    def _await_tokens(self, columns: NDArray[np.int64]) -> None:
        """The last token of each of these is not known yet."""
        sequences = self._sequences
        first = sequences.first_key[columns] * self.block_size
        self._token_ids[first + sequences.num_tokens[columns] - 1] = CHOSEN_LATER

    def _begin(self, plan: Plan) -> Batch:
        """The step of `plan` is under way: its batch."""
        n = int(plan.counters[SCHEDULED])
        lengths = plan.start[:n] + plan.num_new[:n]
        num_tokens = int(plan.num_new[:n].sum())
        width = blocks_for(int(lengths.max(initial=0)), self.block_size)
        seats = self.config.max_num_seqs
        token_ids = np.empty(num_tokens, dtype=np.int64)
        positions = np.empty(num_tokens, dtype=np.int64)
        slots = np.empty(num_tokens, dtype=np.int64)
        block_tables = np.empty((n, width), dtype=np.int32)
        query_starts = np.zeros(n + 1, dtype=np.int64)
        due = np.empty(seats, dtype=np.int64)
        due_rows = np.empty(seats, dtype=np.int64)
        k = _describe(
            self._memory,
            self._sequences,
            plan,
            self.block_size,
            self._token_ids,
            token_ids,
            positions,
            slots,
            block_tables,
            query_starts,
            due,
            due_rows,
        )
        admitted = plan.admitted[: plan.counters[ADMITTED]].copy()
        preempted = plan.preempted[: plan.counters[PREEMPTED]].copy()
        num_cached = plan.num_cached[: len(admitted)].copy()
        self._count(plan, admitted, num_cached, preempted, num_tokens)
        batch = Batch(
            sequences=self._numbers(plan.sequence[:n]),
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            block_tables=block_tables,
            lengths=lengths,
            query_starts=query_starts,
            copies=plan.copies[: plan.counters[COPIES]].copy(),
            due=self._numbers(due[:k]),
            due_rows=due_rows[:k],
            admitted=self._numbers(admitted),
            num_cached=num_cached,
            preempted=self._numbers(preempted),
            awaited=self._awaited(plan, token_ids, query_starts),
        )
        self._under_way.append(_Step(plan, batch, due[:k], self._generation.copy()))
        return batch

    def _awaited(
        self, plan: Plan, token_ids: NDArray[np.int64], query_starts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """See `Batch.awaited`. An awaited token is the only one that its sequence computes."""
        if not self._under_way:
            return np.empty((0, 2), dtype=np.int64)
        places = np.flatnonzero(token_ids == CHOSEN_LATER)
        columns = plan.sequence[np.searchsorted(query_starts, places, side="right") - 1]
        due = self._under_way[0].due
        place_of = np.empty(len(self._alive), dtype=np.int64)
        place_of[due] = np.arange(len(due))
        return np.stack([places, place_of[columns]], axis=1)

    def commit(self, tokens: ArrayLike) -> None:
        """The step has run: `tokens` int64 [k] are what the sequences in `Batch.due` say next.

        The older step, where two are under way. A beam says `CHOSEN_LATER`. Publishes the blocks
        that the step filled. Sequences cancelled meanwhile end now, or with the step that is still
        under way; what those that have ended say is passed over.

        Raises `InvalidInput` for a wrong number of tokens, or without a step; the step goes on.
        """
        if not self._under_way:
            raise InvalidInput("no step is under way: schedule one first")
        step = self._under_way[0]
        due = step.due
        said = arguments.as_integers("tokens", tokens)
        if said.shape != due.shape:
            raise InvalidInput(f"{said.size} tokens, but {len(due)} sequences are due one")
        is_here = self._is_here(step, due)
        if not is_here.all():
            due, said = due[is_here], said[is_here]
        is_beam = self._sequences.is_beam[due]
        if not ((said[~is_beam] >= 0) & (said[~is_beam] <= MAX_TOKEN_ID)).all():
            raise InvalidInput(f"a token id is not 0 to {MAX_TOKEN_ID}")
        if (said[is_beam] != CHOSEN_LATER).any():
            raise InvalidInput(f"a beam has no token of its own yet: give {CHOSEN_LATER}")
        self._forget_ended(step)
        _conclude(
            self._memory,
            self._sequences,
            self._queues,
            step.plan,
            self._limits,
            self._secret,
            self._roots,
            self._keyed,
            self._token_ids,
            due,
            said,
        )
        self._conclude_step()

    def abandon(self) -> list[int]:
        """The step failed: its sequences end, and nothing that it wrote is ever found.

        The older step, where two are under way; the other goes on without those sequences.
        Returns their numbers, with those of samples that were to fork from them, and of all beams
        of their searches.
        """
        if not self._under_way:
            return []
        plan = self._forget_ended(self._under_way[0])
        computing = plan.sequence[: plan.counters[SCHEDULED]].tolist()
        columns = self._with_followers([*computing, *plan.forked[: plan.counters[FORKED]].tolist()])
        numbers = [int(s) for s in self._numbers(np.array(columns, dtype=np.int64))]
        self._doomed.difference_update(columns)
        self._conclude_step(columns)
        return numbers

    def _conclude_step(self, failed: Iterable[int] = ()) -> None:
        """The oldest step is under way no more; columns that `failed` end, and who is doomed."""
        self._newest = self._under_way.pop(0).plan
        if self._under_way:
            # Who is doomed may have a part in it: that ends before the next one is decided.
            self._plans.reverse()
            self._end(sorted(failed))
        else:
            doomed, self._doomed = self._doomed, set()
            self._end(sorted(doomed.union(failed)))

    def _is_here(self, step: _Step, columns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these have not ended since `step` was scheduled."""
        is_here: NDArray[np.bool_] = self._generation[columns] == step.generation[columns]
        return is_here

    def _forget_ended(self, step: _Step) -> Plan:
        """Who has ended since has no part in the plan of `step` any more."""
        plan = step.plan
        n, num_forked = int(plan.counters[SCHEDULED]), int(plan.counters[FORKED])
        is_here = self._is_here(step, plan.sequence[:n])
        if not is_here.all():
            kept = int(is_here.sum())
            for column in (plan.sequence, plan.start, plan.num_new, plan.is_anticipated):
                column[:kept] = column[:n][is_here]
            plan.counters[SCHEDULED] = kept
        forked = plan.forked[:num_forked]
        forked = forked[self._is_here(step, forked)]
        plan.forked[: len(forked)] = forked
        plan.counters[FORKED] = len(forked)
        return plan

    def finish(self, sequences: Iterable[int]) -> None:
        """These sequences have said all; their blocks come back, and cached ones can be hit.

        Samples that were to fork from them end too, and with a beam all of its search.

        Raises `UnknownSequence`, for one that ended already too, and then ends none of them.
        """
        self._leave(self._with_followers([self._column(s) for s in sequences]))

    def cancel(self, sequences: Iterable[int]) -> None:
        """Nobody wants these sequences any more, whether they wait or run.

        Samples that were to fork from them end too, and with a beam all of its search. While a
        step is under way their blocks are being written to, so they come back when that step is
        committed or abandoned, or a step behind it is scheduled ahead.

        Raises `UnknownSequence`, for one that ended already too, and then ends none of them.
        """
        self._leave(self._with_followers([self._column(s) for s in sequences]))

    def token_ids(self, sequence: int) -> NDArray[np.int64]:
        """A copy of all tokens of `sequence`, prompt and answer, int64 [n].

        `CHOSEN_LATER` for one that the running step brings, once the next is scheduled.
        """
        s = self._column(sequence)
        first = int(self._sequences.first_key[s]) * self.block_size
        return self._token_ids[first : first + int(self._sequences.num_tokens[s])].copy()

    def statistics(self) -> SchedulerStatistics:
        """What the memory holds and what happened so far."""
        pool = self._memory.pool
        free, cached = int(pool.counters[FREE]), int(pool.counters[CACHED])
        shared, empty, entries = self._fill()
        totals = self._totals
        return SchedulerStatistics(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            used_blocks=self.num_blocks - free,
            shared_blocks=shared,
            cached_blocks=cached,
            free_blocks=free - cached,
            table_entries=entries,
            held_tokens=(self.num_blocks - free) * self.block_size - empty,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_steps=totals["steps"],
            computed_tokens=totals["computed"],
            query_tokens=totals["queries"],
            hit_tokens=totals["hits"],
            preemptions=totals["preemptions"],
            recomputed_tokens=totals["recomputed"],
            evicted_blocks=int(pool.counters[EVICTED]),
            peak_used_blocks=self._peak_used,
            peak_shared_blocks=self._peak_shared,
            peak_running=self._peak_running,
            mean_waste=self._empty_slots / self._used_slots if self._used_slots else 0.0,
        )

    def verify(self) -> None:
        """Check every law of the memory (docs/laws.md), and that rows belong to running sequences.

        Raises `BrokenLaw`, which lists every broken law.
        """
        broken = laws.broken_laws(self._memory, self.block_size)
        sequences = self._sequences
        rows = sequences.row[self._alive & (sequences.state == RUNNING)]
        taken = np.flatnonzero(self._memory.tables.num_tokens != FREE_ROW)
        if not np.array_equal(np.sort(rows), taken):
            broken.append("the rows in use are not those of the running sequences")
        if broken:
            raise BrokenLaw(broken)

    def _checked_ids(self, token_ids: ArrayLike) -> NDArray[np.int64]:
        ids = arguments.as_integers("token ids", token_ids)
        if len(ids) == 0:
            raise InvalidInput("a prompt needs at least one token")
        if int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID:
            raise InvalidInput(f"a token id is not 0 to {MAX_TOKEN_ID}")
        return ids

    def _numbers(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        numbers: NDArray[np.int64] = columns + COLUMNS * self._generation[columns]
        return numbers

    def _column(self, sequence: int) -> int:
        sequence = arguments.as_integer("sequence", sequence)
        column, generation = sequence % COLUMNS, sequence // COLUMNS
        if (
            not 0 <= column < len(self._alive)
            or not self._alive[column]
            or self._generation[column] != generation
            or column in self._doomed
        ):
            raise UnknownSequence(sequence)
        return column

    def _with_followers(self, columns: list[int]) -> list[int]:
        """`columns` and, of each, the samples that have not forked from it yet."""
        sequences = self._sequences
        everyone = dict.fromkeys(self._with_beams(columns))
        for s in columns:
            if sequences.num_tokens[s] > sequences.prompt_tokens[s]:
                continue  # they have, and where one has ended its column may be another's
            for follower in range(s + 1, s + 1 + int(sequences.num_followers[s])):
                if self._alive[follower] and sequences.state[follower] == EXPECTED:
                    everyone[follower] = None
        return list(everyone)

    def _with_beams(self, columns: list[int]) -> list[int]:
        """`columns`, each once, and all columns of the searches that they belong to."""
        everyone = dict.fromkeys(columns)
        if self._beams:
            for search in set(self._search[columns].tolist()) - {_NO_SEARCH}:
                stop = search + 1 + int(self._sequences.num_followers[search])
                everyone |= dict.fromkeys(range(search, stop))
        return list(everyone)

    def _leave(self, columns: list[int]) -> None:
        expected = [s for s in columns if self._is_to_be_forked(s, columns)]
        if self._under_way:
            self._doomed.update(columns)
        else:
            # One that was to end once it had forked ends now, if there will be no fork.
            self._doomed.difference_update(columns)
            self._doomed.update(expected)
            self._end([s for s in columns if s not in self._doomed])

    def _is_to_be_forked(self, s: int, leaving: list[int]) -> bool:
        """Whether a sample waits for its fork, which will still take place: it ends after that."""
        if self._sequences.state[s] != EXPECTED or self._sequences.is_beam[s]:
            return False
        leader = s
        while self._sequences.num_followers[leader] == 0:
            leader -= 1
        return leader not in leaving

    def _end(self, columns: list[int]) -> None:
        still_expected = [s for s in columns if self._is_to_be_forked(s, columns)]
        if still_expected:
            self._doomed.update(still_expected)
            columns = [s for s in columns if s not in self._doomed]
        if columns:
            ended = np.array(columns, dtype=np.int64)
            scheduler.end(self._memory, self._sequences, self._queues, ended, self.block_size)
            for s in set(self._search[ended].tolist()) - {_NO_SEARCH}:
                del self._beams[s]
            self._search[ended] = _NO_SEARCH
            self._alive[ended] = False
            self._generation[ended] += 1
            self._region_blocks[ended] = 0
            self._lost[ended] = 0

    def _count(
        self,
        plan: Plan,
        admitted: NDArray[np.int64],
        num_cached: NDArray[np.int64],
        preempted: NDArray[np.int64],
        num_tokens: int,
    ) -> None:
        totals, sequences = self._totals, self._sequences
        totals["steps"] += 1
        totals["computed"] += num_tokens
        totals["preemptions"] += len(preempted)
        self._lost[preempted] = plan.num_lost[: len(preempted)]
        if len(admitted):
            first = sequences.num_admissions[admitted] == 1
            totals["queries"] += int(sequences.num_tokens[admitted][first].sum())
            totals["hits"] += int(num_cached[first].sum())
            totals["recomputed"] += int(np.maximum(self._lost[admitted] - num_cached, 0).sum())
            self._lost[admitted] = 0
        used = self.num_blocks - int(self._memory.pool.counters[FREE])
        self._peak_used = max(self._peak_used, used)
        shared, empty, _ = self._fill()
        self._peak_shared = max(self._peak_shared, shared)
        self._peak_running = max(self._peak_running, self.num_running)
        self._used_slots += used * self.block_size
        self._empty_slots += empty

    def _fill(self) -> tuple[int, int, int]:
        """Shared blocks, slots of used blocks without a token, and entries of block tables."""
        pool, tables = self._memory
        seen = np.empty(len(tables.num_tokens), dtype=np.int32)
        return _count_fill(pool.ref_count, tables.entries, tables.num_tokens, self.block_size, seen)

    def _take_columns(self, count: int) -> int:
        """The first of `count` columns in a row that are nobody's."""
        free = np.flatnonzero(~self._alive)
        if len(free) >= count:
            runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
            if len(runs):
                first = int(free[runs[0]])
                self._alive[first : first + count] = True
                return first
        first = len(self._alive)
        self._add_columns(max(count, first, 16))
        self._alive[first : first + count] = True
        return first

    def _add_columns(self, count: int) -> None:
        old = self._sequences
        none = np.zeros(count, dtype=np.int64)
        more = make_sequences(none, none.copy(), none.copy(), none.copy(), none.copy(), old.keys)
        columns = {
            name: np.concatenate([getattr(old, name), getattr(more, name)])
            for name in Sequences._fields
            if name != "keys"
        }
        self._sequences = old._replace(**columns)
        self._roots = np.concatenate([self._roots, np.zeros((count, 2), dtype=np.uint64)])
        self._keyed = np.concatenate([self._keyed, np.zeros(count, dtype=np.bool_)])
        self._alive = np.concatenate([self._alive, np.zeros(count, dtype=np.bool_)])
        self._generation = np.concatenate([self._generation, none])
        self._search = np.concatenate([self._search, np.full(count, _NO_SEARCH)])
        self._region_blocks = np.concatenate([self._region_blocks, none])
        self._lost = np.concatenate([self._lost, none])
        queues = make_queues(len(self._alive), self.config.max_num_seqs)
        size, head = self.num_waiting, int(self._queues.counters[WAITING_HEAD])
        places = (head + np.arange(size)) % len(self._queues.waiting)
        queues.waiting[:size] = self._queues.waiting[places]
        queues.running[:] = self._queues.running
        queues.counters[:] = self._queues.counters
        queues.counters[WAITING_HEAD] = 0
        self._queues = queues

    def _make_regions(self, first: int, count: int, blocks: int) -> None:
        """Give columns `first` to `first + count` room for `blocks` blocks of tokens each."""
        if self._regions_end + count * blocks > len(self._sequences.keys):
            self._move_regions(count * blocks)
        for s in range(first, first + count):
            self._sequences.first_key[s] = self._regions_end
            self._region_blocks[s] = blocks
            self._regions_end += blocks

    def _move_regions(self, blocks: int) -> None:
        """Close the gaps of sequences that ended, in arrays with room for `blocks` more.

        As large as what is alive twice over, so a block is moved O(1) times.
        """
        living = np.flatnonzero(self._region_blocks)
        capacity = max(2 * (int(self._region_blocks.sum()) + blocks), 64)
        token_ids = np.empty(capacity * self.block_size, dtype=np.int64)
        keys = np.empty((capacity, 2), dtype=np.uint64)
        end = 0
        for s in living:
            old, size = int(self._sequences.first_key[s]), int(self._region_blocks[s])
            num_tokens = int(self._sequences.num_tokens[s])
            here, there = end * self.block_size, old * self.block_size
            token_ids[here : here + num_tokens] = self._token_ids[there : there + num_tokens]
            used = int(self._sequences.num_keys[s])
            keys[end : end + used] = self._sequences.keys[old : old + used]
            self._sequences.first_key[s] = end
            end += size
        self._regions_end = end
        self._token_ids = token_ids
        self._sequences = self._sequences._replace(keys=keys)


@compiled_in_place
def _arrive(
    sequences: Sequences,
    queues: Queues,
    token_ids: NDArray[np.int64],
    roots: NDArray[np.uint64],
    keyed: NDArray[np.bool_],
    secret: NDArray[np.uint64],
    root: NDArray[np.uint64],
    ids: NDArray[np.int64],
    first: int,
    num_samples: int,
    total: int,
    block_size: int,
    caching: bool,
) -> None:
    """Fill the columns `first` to `first + num_samples`; the first of them waits."""
    for s in range(first, first + num_samples):
        sequences.state[s] = EXPECTED
        sequences.prompt_tokens[s] = len(ids)
        sequences.total_tokens[s] = total
        sequences.num_tokens[s] = len(ids)
        sequences.row[s] = queue.NO_ROW
        sequences.num_admissions[s] = 0
        sequences.num_followers[s] = num_samples - 1 if s == first else 0
        sequences.is_beam[s] = False
        sequences.num_keys[s] = 0
        roots[s, 0] = root[0]
        roots[s, 1] = root[1]
        keyed[s] = caching
        start = sequences.first_key[s] * block_size
        for i in range(len(ids)):
            token_ids[start + i] = ids[i]
        if caching:
            for block in range(len(ids) // block_size):
                if s == first:
                    _name_block(sequences, roots, token_ids, secret, s, block, block_size)
                else:  # the same tokens have the same key
                    key, leaders = sequences.first_key[s], sequences.first_key[first]
                    sequences.keys[key + block, 0] = sequences.keys[leaders + block, 0]
                    sequences.keys[key + block, 1] = sequences.keys[leaders + block, 1]
            sequences.num_keys[s] = len(ids) // block_size
    queue.push_back(sequences, queues, first)


@compiled_in_place
def _name_block(
    sequences: Sequences,
    roots: NDArray[np.uint64],
    token_ids: NDArray[np.int64],
    secret: NDArray[np.uint64],
    s: int,
    block: int,
    block_size: int,
) -> None:
    """Compute the key of one full block of `s`; the one before it has its key."""
    key = sequences.first_key[s] + block
    if block == 0:
        parent0, parent1 = roots[s, 0], roots[s, 1]
    else:
        parent0, parent1 = sequences.keys[key - 1, 0], sequences.keys[key - 1, 1]
    start = key * block_size
    key0, key1 = block_key(secret, parent0, parent1, token_ids, start, start + block_size)
    sequences.keys[key, 0] = key0
    sequences.keys[key, 1] = key1


@compiled_in_place
def _describe(
    memory: Memory,
    sequences: Sequences,
    plan: Plan,
    block_size: int,
    all_token_ids: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    slots: NDArray[np.int64],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int64],
    due: NDArray[np.int64],
    due_rows: NDArray[np.int64],
) -> int:
    """Write the arrays of a `Batch`; returns how many sequences are due a token."""
    place, num_due = 0, 0
    for i in range(plan.counters[SCHEDULED]):
        s = plan.sequence[i]
        row = sequences.row[s]
        start = plan.start[i]
        stop = start + plan.num_new[i]
        first = sequences.first_key[s] * block_size
        write_slots(memory.tables.entries, row, start, stop, block_size, slots, place)
        for t in range(start, stop):
            token_ids[place + t - start] = all_token_ids[first + t]
            positions[place + t - start] = t
        held = blocks_for(stop, block_size)
        for j in range(block_tables.shape[1]):
            block_tables[i, j] = memory.tables.entries[row, j] if j < held else NO_BLOCK
        place += stop - start
        query_starts[i + 1] = place
        if stop == sequences.num_tokens[s]:
            followers = 0
            if stop == sequences.prompt_tokens[s] and not sequences.is_beam[s]:
                followers = sequences.num_followers[s]
            for sample in range(s, s + 1 + followers):
                due[num_due] = sample
                due_rows[num_due] = place - 1
                num_due += 1
    return num_due


@compiled_in_place
def _count_fill(
    ref_count: NDArray[np.int32],
    entries: NDArray[np.int32],
    num_tokens_of: NDArray[np.int64],
    block_size: int,
    seen: NDArray[np.int32],
) -> tuple[int, int, int]:
    """Shared blocks, slots of used blocks without a token, and entries of block tables.

    Only last blocks have empty slots, and one that several share is counted once: `seen` [rows]
    is room to remember those.
    """
    num_shared = num_empty = num_entries = num_seen = 0
    for block in range(len(ref_count)):
        num_shared += ref_count[block] > 1
    for row in range(len(num_tokens_of)):
        num_tokens = max(num_tokens_of[row], 0)
        num_entries += blocks_for(num_tokens, block_size)
        if num_tokens % block_size == 0:
            continue
        last = entries[row, num_tokens // block_size]
        if ref_count[last] > 1:
            place = 0
            while place < num_seen and seen[place] != last:
                place += 1
            if place < num_seen:
                continue
            seen[num_seen] = last
            num_seen += 1
        num_empty += block_size - num_tokens % block_size
    return int(num_shared), int(num_empty), int(num_entries)


@compiled_in_place
def _conclude(
    memory: Memory,
    sequences: Sequences,
    queues: Queues,
    plan: Plan,
    limits: Limits,
    secret: NDArray[np.uint64],
    roots: NDArray[np.uint64],
    keyed: NDArray[np.bool_],
    token_ids: NDArray[np.int64],
    due: NDArray[np.int64],
    said: NDArray[np.int64],
) -> None:
    """Commit the step, write down what was said, and name the blocks that are full of it now.

    A block is named before its last token is computed, so that its key waits for the content.
    """
    scheduler.commit(memory, sequences, queues, plan, limits)
    block_size = limits.block_size
    for i in range(len(due)):
        s = due[i]
        if not sequences.is_beam[s]:
            _write_down(sequences, roots, keyed, token_ids, secret, s, said[i], block_size)
            if keyed[s] and memory.tables.num_tokens[sequences.row[s]] >= sequences.num_tokens[s]:
                _await_newest(memory, sequences, s, block_size)


@compiled_in_place
def _await_newest(memory: Memory, sequences: Sequences, s: int, block_size: int) -> None:
    """The last token of `s` is computed by a step that was scheduled before it was known: note the
    key of the block that it fills, if it fills one."""
    stop, first = sequences.num_tokens[s], sequences.first_key[s]
    keys = sequences.keys[first : first + sequences.num_keys[s]]
    allocation.await_keys(memory, sequences.row[s], stop - 1, stop, keys, block_size)


@compiled_in_place
def _branch(
    memory: Memory,
    sequences: Sequences,
    queues: Queues,
    limits: Limits,
    secret: NDArray[np.uint64],
    roots: NDArray[np.uint64],
    keyed: NDArray[np.bool_],
    token_ids: NDArray[np.int64],
    beams: NDArray[np.int64],
    parents: NDArray[np.int64],
    search: int,
    is_free: NDArray[np.bool_],
    said: NDArray[np.int64],
    next_beams: NDArray[np.int64],
) -> None:
    """Fork beams, with the tokens that they have, and then write down what each says next."""
    scheduler.branch(memory, sequences, queues, limits, beams, parents, search, is_free, next_beams)
    block_size = limits.block_size
    for i in range(len(next_beams)):
        s, parent = next_beams[i], beams[parents[i]]
        if s != parent:
            old, new = sequences.first_key[parent] * block_size, sequences.first_key[s] * block_size
            for t in range(sequences.num_tokens[parent]):
                token_ids[new + t] = token_ids[old + t]
    for i in range(len(next_beams)):
        s = next_beams[i]
        sequences.num_tokens[s] += 1
        _write_down(sequences, roots, keyed, token_ids, secret, s, said[i], block_size)


@compiled_in_place
def _write_down(
    sequences: Sequences,
    roots: NDArray[np.uint64],
    keyed: NDArray[np.bool_],
    token_ids: NDArray[np.int64],
    secret: NDArray[np.uint64],
    s: int,
    said: int,
    block_size: int,
) -> None:
    """`said` is the last token of `s`; name the block that is full of tokens with it."""
    num_tokens = sequences.num_tokens[s]
    token_ids[sequences.first_key[s] * block_size + num_tokens - 1] = said
    if keyed[s] and num_tokens % block_size == 0:
        block = num_tokens // block_size - 1
        _name_block(sequences, roots, token_ids, secret, s, block, block_size)
        sequences.num_keys[s] = block + 1
