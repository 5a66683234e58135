"""The scheduler: which tasks take part in the next forward.

Rounds of sessions that decode come first, whole and in order of arrival, then pieces of prompts, as many as do not make
those rounds wait for long (`pace.py`), in an order that is fair and favours short ones (`prompt_order.py`). Neither the
order nor the size of pieces changes what a task computes.

A task runs once its session is resident in the cache (`residency.py`), and then to its end, with its sequence pinned.
If running tasks outgrow the cache the youngest is suspended until another one has ended.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol

from specdec.engine.batch import DECODING_TOKENS, Batch, ReadingBudget, TaskT
from specdec.engine.cache import KvCache
from specdec.engine.errors import Abandoned, CacheFull, EngineError
from specdec.engine.feed import Feed, ForwardOutput
from specdec.engine.pace import Pace, Piece
from specdec.engine.prompt_order import Prompt, PromptOrder
from specdec.engine.residency import Residency, reserved
from specdec.engine.task import TaskState
from specdec.outside import REAL, Outside

STUCK_S = 0.02  # between two looks whether a resident has left, where nothing else can be done


class Forwards(Protocol):
    """The model interface that the loop needs."""

    @property
    def cache(self) -> KvCache:
        """Where the sequences are."""
        ...

    def check(self, feed: Feed) -> None:
        """Raise EngineError for a feed that `forward` would refuse."""
        ...

    def forward(self, feeds: list[Feed], when_prepared: Callable[[], None]) -> ForwardOutput:
        """Append the feeds' tokens; return what they ask for. Call back before what takes long, any number of times."""
        ...


class _Place(Generic[TaskT]):
    """A task in the schedule."""

    def __init__(self, task: TaskT) -> None:
        self.task = task
        self.begun_length = 0  # of the sequence when the task began
        self.suspended_length = 0  # of the sequence when the task was suspended
        self.num_ended = 0  # tasks that had ended when the task was suspended
        self.has_prompt = len(task.tokens) > DECODING_TOKENS  # what it began with is read in pieces
        self.has_fed = False  # took part in a forward

    @property
    def number(self) -> int:
        """The order of arrival."""
        return self.task.submission.number

    @property
    def certain_length(self) -> int:
        """Tokens that stay cached after a failure: those before the task, and if it was only given up all of the text.

        What a forward or the processor has failed on is computed again.
        """
        task = self.task
        is_given_up = isinstance(task.submission.error, Abandoned)
        return max(self.begun_length, task.sequence.num_committed) if is_given_up else self.begun_length

    @property
    def is_decoding(self) -> bool:
        """Whether all its tokens go into one forward, before any prompt's."""
        return self.task.has_proceeded or not self.has_prompt


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits for the engine, as of its last step; replaced as a whole, so that any thread may read it."""

    num_resident: int = 0  # sessions with a place in the cache
    num_without_place: int = 0  # tasks that wait for one
    num_prompt_tokens: int = 0  # still to be read, those of waiting tasks included
    prompt_s: float = 0.0  # that reading them takes


class Schedule(Generic[TaskT]):
    """The waiting and the running tasks, on the engine thread."""

    def __init__(
        self,
        model: Forwards,
        max_batch_tokens: int,
        prefill_chunk_tokens: int,
        turn_s: float,
        outside: Outside = REAL,
    ) -> None:
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._outside = outside
        self._pace, self._order = Pace(), PromptOrder()
        self._residency = Residency(model.cache, turn_s)
        self._waiting: list[_Place[TaskT]] = []  # and suspended
        self._running: list[_Place[TaskT]] = []
        self._ended: list[TaskT] = []  # whose results are not delivered yet
        self._num_ended = 0
        self._num_decoding = 0  # tokens of rounds in the last batch
        self.queue = Queue()
        self._is_stuck = False  # nothing could be done in the last step
        self._pieces: list[Piece] = []  # of prompts in it

    @property
    def num_waiting(self) -> int:
        """Waiting and suspended tasks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Running tasks."""
        return len(self._running)

    @property
    def tasks(self) -> list[TaskT]:
        """All tasks that have not ended, running ones first."""
        return [place.task for place in (*self._running, *self._waiting)]

    def add(self, task: TaskT) -> None:
        """Let a task that was submitted wait for its first forward."""
        self._waiting.append(_Place(task))
        self._pace.observe_arrival(task.key, task.submission.arrived_s)

    def forget(self, key: str) -> None:
        """Forget a session that is over."""
        self._pace.forget(key)
        self._residency.forget(key)

    def leave(self, key: str) -> None:
        """Let a session make room for others: nobody asks for its next round now."""
        self._pace.forget(key)
        self._residency.forget(key)  # whether it had its turn too: it may never come back

    def hold_s(self) -> float:
        """Return how long the next forward should wait for what may arrive."""
        if self._is_stuck:
            return STUCK_S
        if not self.tasks or any(place.is_decoding for place in self._running):
            return 0.0
        if any(len(place.task.tokens) <= DECODING_TOKENS for place in self._waiting):
            return 0.0
        return self._pace.hold_s(self._outside.now_s())

    def choose_batch(self) -> list[tuple[TaskT, Feed]]:
        """Reserve room for, and return, what goes into the next forward."""
        batch = Batch[TaskT](self._max_batch_tokens)
        self._continue_rounds(batch)
        self._admit_waiting()
        self._continue_rounds(batch)
        self._num_decoding = self._max_batch_tokens - batch.num_free
        self._pieces = self._read_prompts(batch)
        for place in self._running:
            self._note_fed(place, batch)
        self._is_stuck = not batch.feeds and not self._ended
        self.queue = self._measured_queue()
        return batch.feeds

    def _measured_queue(self) -> Queue:
        prompts = [place.task for place in (*self._running, *self._waiting) if not place.is_decoding]
        num_tokens = sum(len(task.tokens) for task in prompts)
        prompt_s = sum(self._pace.reading_s(Piece(len(task.tokens), 0)) for task in prompts)
        num_without = sum(not self._residency.has(place.task.key) for place in self._waiting)
        return Queue(len(self._residency), num_without, num_tokens, prompt_s)

    @property
    def num_round_tokens(self) -> int:
        """Tokens of the last batch; 0 if there is a piece of a prompt in it."""
        return 0 if self._pieces else self._num_decoding

    def note_forward(self, elapsed_s: float) -> None:
        """Take note of what the forward over the last batch took."""
        self._pace.observe_forward(self._num_decoding, self._pieces, elapsed_s, self._outside.now_s())

    def end_done(self) -> list[TaskT]:
        """Take out the tasks that are done; return those that ended since the last call."""
        for place in [*self._running, *self._waiting]:
            if place.task.done:
                self._end(place)
        ended, self._ended = self._ended, []
        return ended

    def check(self, task: TaskT) -> None:
        """Raise what would make the task fail in a forward, where it would fail the batch."""
        if not task.tokens:
            raise EngineError(f"task {task.key!r} was neither ended nor given tokens; do one of them")
        self._model.check(task.next_feed(len(task.tokens)))
        if task.num_together > self._max_batch_tokens:
            raise EngineError(
                f"{task.num_together} rows do not fit into one forward of {self._max_batch_tokens} tokens"
            )
        length = task.sequence.length + len(task.tokens)
        if length > self._model.cache.num_tokens:
            raise CacheFull(
                f"{length} tokens do not fit into the KV cache, which holds {self._model.cache.num_tokens}; "
                "give it more bytes or shorten the sequence"
            )

    # --- rounds

    def _continue_rounds(self, batch: Batch[TaskT]) -> None:
        """Add each running round to the batch; while the cache is full make room, or suspend the youngest."""
        for place in sorted(self._running, key=lambda place: place.number):
            if place.is_decoding and place.task.state is TaskState.RUNNING and not batch.has(place.task):
                self._continue_round(place, batch)

    def _continue_round(self, place: _Place[TaskT], batch: Batch[TaskT]) -> None:
        task = place.task
        if len(task.tokens) > batch.num_free:
            return
        while not reserved(task.sequence, task.sequence.length + len(task.tokens)):
            if not self._residency.dismiss_latest():
                self._suspend(self._youngest_outside(batch))
            if task.state is not TaskState.RUNNING:
                return
        batch.add(task, len(task.tokens))

    def _youngest_outside(self, batch: Batch[TaskT]) -> _Place[TaskT]:
        """Return the running task that must make room for an older one, or for itself."""
        return max((place for place in self._running if not batch.has(place.task)), key=lambda place: place.number)

    # --- prompts

    def _read_prompts(self, batch: Batch[TaskT]) -> list[Piece]:
        """Add pieces of prompts to the batch."""
        now_s = self._outside.now_s()
        rounds = [place for place in self._running if place.is_decoding and batch.has(place.task)]
        prompts = [self._prompt(place) for place in self._running if not place.is_decoding]
        arrivals = [None if place.has_fed else place.task.submission.arrived_s for place in rounds]
        allowance_s = self._pace.allowance_s(self._num_decoding, arrivals, now_s, len(prompts))
        budget = ReadingBudget(self._pace, allowance_s, self._prefill_chunk_tokens, beside=bool(rounds))
        pieces = list[Piece]()
        for place in self._order.ordered(prompts):
            task, past = place.task, place.task.sequence.length
            num_tokens = budget.num_tokens_for(task, batch.num_free)
            if num_tokens and reserved(task.sequence, past + num_tokens):
                batch.add(task, num_tokens)
                budget.spend(num_tokens, past)
                pieces.append(Piece(num_tokens, past))
                self._order.charge(task.group, self._pace.reading_s(pieces[-1]))
        return pieces

    def _prompt(self, place: _Place[TaskT]) -> Prompt[_Place[TaskT]]:
        task = place.task
        left_s = self._pace.reading_s(Piece(len(task.tokens), task.sequence.length))
        return Prompt(place, task.group, left_s, max(0.0, task.submission.age_s - task.timings.forward_s))

    def _note_fed(self, place: _Place[TaskT], batch: Batch[TaskT]) -> None:
        if not place.has_fed and batch.has(place.task):
            place.has_fed = True
            place.task.timings.queue_s = place.task.timings.queue_s or place.task.submission.age_s

    # --- admission

    def _admit_waiting(self) -> None:
        """Let waiting tasks run: those of residents, and others in turn up to the first that does not fit.

        A task whose sequence is in use waits, and does not hold up the tasks after it.
        """
        busy = {place.task.key for place in self._running}
        is_full = False
        for place in sorted(self._waiting, key=self._rank):
            task = place.task
            if task.key not in busy and not (is_full and self._needs_room(place)):
                is_full = not self._admit(place) or is_full
            busy.add(task.key)

    def _rank(self, place: _Place[TaskT]) -> tuple[bool, int]:
        """Order those that wait for room: sessions with text first, unless they had their turn; then by arrival."""
        return not place.task.has_text or self._residency.had_turn(place.task.key), place.number

    def _needs_room(self, place: _Place[TaskT]) -> bool:
        """Whether the task's session is not resident, and is not just to be told that its tokens are gone."""
        task = place.task
        return not self._residency.has(task.key) and not task.is_missed_by(self._model.cache.open(task.key))

    def _admit(self, place: _Place[TaskT]) -> bool:
        """Let a task run if there is room for its tokens; return False where there is not."""
        if self._waits_for_an_end(place):
            return False
        if self._needs_room(place) and not self._enter(place):
            return False
        if not self._begin(place):
            return True
        task = place.task
        while not reserved(task.sequence, task.sequence.length + len(task.tokens)):
            if not self._residency.dismiss_latest() or not self._residency.has(task.key):
                return False
        self._run(place)
        return True

    def _enter(self, place: _Place[TaskT]) -> bool:
        """Make a task's session resident if there is room, or can be made."""
        now_s, task = self._outside.now_s(), place.task
        sequence, length = self._model.cache.open(task.key), task.total_length
        if length > self._model.cache.num_tokens or self._residency.admit(sequence, length, now_s):
            return True  # what never fits is refused when it begins
        self._residency.make_room(self._pace.absence_s, now_s)
        return self._residency.admit(sequence, length, now_s)

    def _waits_for_an_end(self, place: _Place[TaskT]) -> bool:
        """Whether the task was suspended, and no task has ended since."""
        is_suspended = place.task.state is TaskState.SUSPENDED
        return is_suspended and bool(self._running) and place.num_ended == self._num_ended

    def _begin(self, place: _Place[TaskT]) -> bool:
        """Prepare a task, unless it is suspended and still cached; return whether it can go on."""
        task = place.task
        task.sequence = self._model.cache.open(task.key)
        if task.state is TaskState.SUSPENDED and task.sequence.length == place.suspended_length:
            return True
        try:
            task.restart()
            task.prepare()
            place.begun_length = task.sequence.length
            place.has_prompt = len(task.tokens) > DECODING_TOKENS
            if not task.done:
                self.check(task)
        except Exception as error:
            task.fail(error)
        if task.done:
            self._end(place)
        return not task.done

    def _run(self, place: _Place[TaskT]) -> None:
        self._waiting.remove(place)
        self._running.append(place)
        place.task.sequence.pin()
        place.task.state = TaskState.RUNNING

    def _suspend(self, place: _Place[TaskT]) -> None:
        """Let a running task wait for room; what it has cached may be evicted."""
        self._running.remove(place)
        place.task.sequence.unpin()
        self._residency.dismiss(place.task.key)
        place.task.state = TaskState.SUSPENDED
        place.suspended_length = place.task.sequence.length
        place.num_ended = self._num_ended
        self._waiting.append(place)

    def _end(self, place: _Place[TaskT]) -> None:
        """Release what a finished task holds; if it failed, truncate its sequence to what is certain."""
        task, state, now_s = place.task, place.task.state, self._outside.now_s()
        self._num_ended += 1
        task.state = TaskState.ENDED
        if state is TaskState.RUNNING:
            self._running.remove(place)
            task.sequence.unpin()
        else:
            self._waiting.remove(place)
        if task.submission.error is None:
            self._pace.observe_end(task.key, now_s)
        elif state is not TaskState.WAITING:
            task.sequence.truncate(min(task.sequence.length, place.certain_length))
        # here, as a task that follows it is admitted before anybody could see the session idle
        self._residency.note_used(task.key, now_s, others_wait=self.queue.num_without_place > 0)
        self._ended.append(task)
