"""Instructions that a target writes itself (Xu et al. 2024, "Magpie"): far more varied than any grammar of ours.

A chat model that is given the beginning of a user's message, and nothing else, writes one.
"""

from collections.abc import Collection, Iterator
from itertools import cycle

from tokenizers import Tokenizer

from coordinator.chat import ChatTemplate
from models.heads.prompts import TEMPERATURES
from models.heads.samples import Answering, Instruction
from models.instructions import held_out_prompts, word_runs

KIND = "own"
TEMPERATURE = 0.7  # at which they are written; at 1 a small model's become nonsense
PLACE = "HERE-THE-MESSAGE"  # of the user's message in a rendered chat
WORDS = (3, 120)
SYSTEMS = (  # messages that lead to instructions of many kinds; None: the model's own
    None,
    "You help programmers. Users ask you to write, explain or correct code in Python, JavaScript, SQL or C.",
    "You are a mathematics tutor. Users give you problems with numbers, and you solve them step by step.",
    None,
    "You shorten texts. Users paste a text of several sentences and ask for a summary of it.",
    "You find facts in texts. Users paste a message and ask for its names, dates or amounts, as JSON or a list.",
    "You are a translator. Users give you a sentence and the language into which it is to be translated.",
)
CHARACTERS_OF_A_MARK = "<|"  # a message that imitates the template is none


class OwnInstructions:
    """What a target asks itself."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = template.render([("user", PLACE)]).split(PLACE)
        self._beginnings = [self._beginning(template, system) for system in SYSTEMS]
        self._seen: set[str] = set()
        self._forbidden = {run for prompt in held_out_prompts() for run in word_runs(prompt)}

    def written(self, sampler: Answering, num_at_once: int) -> Iterator[Instruction]:
        """Yield instructions, endlessly, half of them to be answered greedily; the sampler writes `num_at_once`."""
        temperatures = cycle(TEMPERATURES)
        for beginning, tokens, _ in sampler.answers(cycle(self._beginnings), num_at_once):
            message = self._tokenizer.decode(tokens[len(beginning.tokens) :], skip_special_tokens=True).strip()
            if self.takes(message):
                yield Instruction(KIND, next(temperatures), self._encoded(self._before + message + self._after))

    def _beginning(self, template: ChatTemplate, system: str | None) -> Instruction:
        messages = [("user", PLACE)] if system is None else [("system", system), ("user", PLACE)]
        return Instruction(KIND, TEMPERATURE, self._encoded(template.render(messages).split(PLACE)[0]))

    def takes(self, message: str) -> bool:
        """Whether a message is to be answered: a new one, of a common length, unlike any that is held out."""
        is_usual = WORDS[0] <= len(message.split()) <= WORDS[1] and CHARACTERS_OF_A_MARK not in message
        if not is_usual or message in self._seen or shares_words(message, self._forbidden):
            return False
        self._seen.add(message)
        return True

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def shares_words(message: str, forbidden: Collection[tuple[str, ...]]) -> bool:
    """Whether the message has a run of words in common with what is forbidden."""
    return not word_runs(message).isdisjoint(forbidden)
