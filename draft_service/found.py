"""What followed earlier occurrences of a context, in a text itself and in finished ones."""

from draft_service.context_index import ContextIndex
from specdec.drafting.candidate_tree import Continuation, reach

NUM_MATCHES = 32  # of one index; more find no better drafts


def found_in(text: ContextIndex, context: bytearray, num_tokens: int) -> list[Continuation]:
    """Return what followed the context in finished texts, at most `num_tokens` tokens each."""
    return [
        Continuation(text.following(match.position, reach(match.num_tokens, num_tokens)), match.num_tokens)
        for match in text.matches(context, NUM_MATCHES)
    ]


def found_before(text: ContextIndex, num_tokens: int) -> list[Continuation]:
    """Return what followed earlier occurrences of a text's own end; a loop goes on as a loop."""
    return [
        Continuation(text.repeating(match.position, reach(match.num_tokens, num_tokens)), match.num_tokens)
        for match in text.matches(text.context(), NUM_MATCHES)
    ]
