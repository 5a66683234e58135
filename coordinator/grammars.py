"""Grammars of sessions at the coordinator: checked with the request, and drafts of the text that they force."""

from collections.abc import Sequence
from contextlib import suppress

from tokenizers import Tokenizer

from specdec.errors import InvalidArgumentError, OverloadedError
from specdec.exact.grammar import GrammarText
from specdec.exact.values import Proposal, one_hot
from specdec.serving.grammars import GrammarCompiler
from specdec.types import ModelInfo, SamplingParams

MIN_FORCED = 2  # tokens; a drafter proposes more than one in about the same time


class SessionGrammars:
    """Compiles the grammars of requests for the target's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compilers: dict[tuple[int, tuple[int, ...]], GrammarCompiler] = {}  # a new target may have other ends

    async def check(self, sampling: SamplingParams, target: ModelInfo) -> None:
        """Raise InvalidArgumentError for a grammar that the target cannot follow, OverloadedError if many wait."""
        await self._compiler(target).text(sampling)

    async def forced(self, sampling: SamplingParams, target: ModelInfo, maximum: int) -> "ForcedDrafter | None":
        """Return what drafts at most `maximum` tokens by a session's grammar; None where it has none."""
        text = None
        with suppress(InvalidArgumentError, OverloadedError):  # the target's workers have the say
            text = await self._compiler(target).text(sampling)
        return ForcedDrafter(text, maximum) if text and maximum else None

    def close(self) -> None:
        """End what compiles."""
        for compiler in self._compilers.values():
            compiler.close()

    def _compiler(self, target: ModelInfo) -> GrammarCompiler:
        key = target.vocab_size, target.eos_token_ids
        if key not in self._compilers:
            self._compilers[key] = GrammarCompiler(self._tokenizer.to_str, *key, tries=True)
        return self._compilers[key]


class ForcedDrafter:
    """Proposes the tokens of the only text that can follow by a session's grammar; asks no worker."""

    def __init__(self, grammar: GrammarText, maximum: int) -> None:
        self._grammar, self._maximum = grammar, maximum

    def propose(self, committed: Sequence[int], num_prompt_tokens: int, remaining_tokens: int) -> Proposal:
        """Return a chain that leaves room for the token that closes the round; often empty."""
        try:
            # what was committed stays as it was
            self._grammar.follow(len(committed), committed, len(committed), num_prompt_tokens)
            tokens = self._grammar.forced(min(self._maximum, max(0, remaining_tokens - 1)))
        except InvalidArgumentError:  # which the target's worker finds too, and says
            return Proposal()
        return Proposal(tuple(tokens), tuple(map(one_hot, tokens)))
