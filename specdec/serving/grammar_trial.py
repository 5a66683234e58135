"""Tries grammars in a process of their own before they are compiled in this one.

llguidance limits neither the time of every compilation nor the depth of its stack: `{"multipleOf": 9999991}` takes 30
seconds and 750 MB, and a chain of 4,000 rules overflows the stack, which ends the process. So a server has each new
grammar of a request tried here, where all that this can end is the trial.

As a program: reads lines of JSON, the tokenizer first, then grammars; answers a line each, null or what is wrong.
"""

import json
import os
import resource
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from specdec.errors import InvalidArgumentError
from specdec.exact.grammar import Grammar, Grammars

MAX_COMPILE_S = 2.0  # a usual grammar takes milliseconds
MAX_START_S = 60.0  # imports, and a large tokenizer
MAX_ADDED_BYTES = 256 * 2**20  # a usual grammar takes less than 10 MiB
STACK_BYTES = 2 * 2**20  # a quarter of what threads usually have, so that what passes here is safe there
TOO_MUCH_TIME = f"takes more than {MAX_COMPILE_S:g} seconds to compile; make it simpler"
TOO_MUCH_MEMORY = "takes too much memory to compile, or is nested too deeply; make it simpler"


class GrammarTrial:
    """Tries grammars for one tokenizer in a process, which starts with the first one. Not thread-safe."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer_json, vocab_size, eos_token_ids
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidArgumentError for a grammar that is wrong, or takes too much. Blocks for MAX_COMPILE_S."""
        if self._process is None:
            self._start()
        try:
            problem = self._answer(grammar, MAX_COMPILE_S)
        except (TimeoutError, EOFError) as error:
            self.close()
            problem = {f"sampling.{grammar[0]}": TOO_MUCH_TIME if isinstance(error, TimeoutError) else TOO_MUCH_MEMORY}
        if problem:
            raise InvalidArgumentError(problem)

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a crash prints may hold the grammar
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._answer(self._tokenizer, MAX_START_S)

    def _answer(self, question: Any, patience_s: float) -> Any:
        """Return the answer to a question. Raises TimeoutError, or EOFError for a process that ended."""
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        if not select.select([self._process.stdout], [], [], patience_s)[0]:
            raise TimeoutError
        if not (line := self._process.stdout.readline()):
            raise EOFError
        return json.loads(line)


def _answer_questions() -> None:
    tokenizer_json, vocab_size, eos_token_ids = json.loads(sys.stdin.readline())
    grammars = Grammars(tokenizer_json, vocab_size, eos_token_ids)
    _limit_memory()
    _tell(None)
    for line in sys.stdin:
        field, value = json.loads(line)
        try:
            grammars.compile((field, value))
        except InvalidArgumentError as error:
            _tell(error.violations)
        else:
            _tell(None)


def _tell(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _limit_memory() -> None:
    """Let allocations fail that add more than MAX_ADDED_BYTES, where the system says what is in use."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_ADDED_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_questions)
    thread.start()
    thread.join()
