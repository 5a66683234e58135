"""Grammars of sessions, compiled on a thread: no grammar stalls other sessions, and their number is limited."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from specdec.errors import InvalidArgumentError, OverloadedError
from specdec.exact.grammar import Grammar, Grammars, GrammarText
from specdec.serving.grammar_trial import GrammarTrial
from specdec.types import SamplingParams

MAX_WAITING = 64  # grammars that wait to be compiled


class GrammarCompiler:
    """Compiles grammars for the tokenizer of one model. What it needs is built with the first one."""

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int], tries: bool = False
    ) -> None:
        """`tokenizer_json` gives the tokenizer, as the package tokenizers writes it.

        `tries`: new grammars are tried in a process of their own first, as they come from clients.
        """
        self._tries = tries
        self._trial: GrammarTrial | None = None  # on the thread
        self._tokenizer_json, self._vocab_size, self._eos_token_ids = tokenizer_json, vocab_size, tuple(eos_token_ids)
        self._grammars: Grammars | None = None  # on the thread
        self._thread: ThreadPoolExecutor | None = None
        self._num_waiting = 0

    async def text(self, sampling: SamplingParams) -> GrammarText | None:
        """Return an empty completion of a session, None where it may have any form.

        Raises InvalidArgumentError for a wrong grammar, OverloadedError where too many wait.
        """
        grammar = sampling.grammar
        if grammar is None:
            return None
        if not self._eos_token_ids:
            problem = "cannot be used: this model has no end-of-sequence token with which a text could end"
            raise InvalidArgumentError({f"sampling.{grammar[0]}": problem})
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._num_waiting} grammars wait to be compiled; try again soon", limit="grammars")
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, grammar)
        finally:
            self._num_waiting -= 1

    def _compiled(self, grammar: Grammar) -> GrammarText:
        if self._grammars is None:
            self._grammars = self._built(grammar[0])
        if self._trial and grammar not in self._grammars:
            self._trial.check(grammar)
        return self._grammars.text(grammar)

    def _built(self, field: str) -> Grammars:
        tokenizer = self._tokenizer_json(), self._vocab_size, self._eos_token_ids
        try:
            grammars = Grammars(*tokenizer)
        except ValueError as error:
            problem = f"cannot be used with this model's tokenizer: {error}"
            raise InvalidArgumentError({f"sampling.{field}": problem}) from error
        self._trial = GrammarTrial(*tokenizer) if self._tries else None
        return grammars

    def close(self) -> None:
        """Drop what waits."""
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)  # a compilation takes some seconds at most
        if self._trial:
            self._trial.close()


class SessionGrammar:
    """A session's grammar at a worker, compiled by its first round."""

    def __init__(self, compiler: GrammarCompiler | None = None) -> None:
        """Without a compiler the worker knows no grammars."""
        self._compiler = compiler
        self.text: GrammarText | None = None  # for the thread of the model

    async def compile(self, sampling: SamplingParams) -> None:
        """Compile it unless that was tried before. Raises InvalidArgumentError, OverloadedError."""
        compiler, self._compiler = self._compiler, None
        if compiler:
            self.text = await compiler.text(sampling)
