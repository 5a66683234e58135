"""Rounds of speculative decoding on a tiny model, compared position by position with transformers' forward."""

import random

import torch

from specdec.engine import Feed, LanguageModel, Sequence
from specdec.exact.tree import path_to
from tests.engine.tiny_models import ReferenceModel, assert_close, random_tokens

TEXT_LENGTH = 30  # longer than the tiny models' sliding windows
TREE_SIZE = 12
NUM_ROUNDS = 3


def random_parents(rng: random.Random, size: int) -> tuple[int, ...]:
    """Return a tree with many branches, deeper than the tiny models' sliding windows."""
    return tuple(rng.randint(max(0, node - 2), node) for node in range(size))


def check_tree_rounds(model: LanguageModel, reference: ReferenceModel) -> None:
    """Run rounds with trees, batched with a growing chain and a prefill; compare every row with the reference.

    Each round accepts the path to a random node, so that its keys and values must be compacted.
    """
    rng = random.Random(1)
    text, tree = random_tokens(1, TEXT_LENGTH), list[int]()
    sequence, chain = model.cache.open("tree"), Chain(model, reference, "chain")
    model.forward([Feed(sequence, text[:-1], 0)])
    start, closing = TEXT_LENGTH, text[-1:]  # the last token is fed with the first tree
    sequence.mark_committed(TEXT_LENGTH)
    for number in range(NUM_ROUNDS):
        tree, parents = random_tokens(10 + number, TREE_SIZE), random_parents(rng, TREE_SIZE)
        feed = Feed(sequence, [*closing, *tree], TREE_SIZE + 1, parents)
        prefill = Feed(model.cache.open(f"prefill {number}"), random_tokens(20, 23), 23)
        rows, chain_rows, prefill_rows = forward(model, [feed, chain.feed(number + 1), prefill])
        check_tree(reference, text, tree, parents, rows)
        chain.check(chain_rows)
        assert_close(prefill_rows, reference.logits(prefill.tokens))
        path = [tree[node] for node in path_to(rng.randrange(TREE_SIZE // 2, TREE_SIZE) + 1, parents)]
        text += [*path, 7]
        closing = sequence.resume(start, [*path, 7], num_committed=len(text), min_fed=1)
        assert closing == [7]
        start = len(text)
    assert list(sequence.tokens) == text[:-1]


def forward(model: LanguageModel, feeds: list[Feed]) -> list[torch.Tensor]:
    """Return the logits of each feed."""
    return list(torch.split(model.forward(feeds).logits, [feed.num_rows for feed in feeds]))


def check_tree(
    reference: ReferenceModel, text: list[int], tree: list[int], parents: tuple[int, ...], rows: torch.Tensor
) -> None:
    """Compare rows [1 + len(tree), vocab] with the reference for each path from the root to a leaf."""
    assert_close(rows[0], reference.logits(text)[-1])
    for leaf in set(range(len(parents))) - {parent - 1 for parent in parents}:
        path = path_to(leaf + 1, parents)
        expected = reference.logits([*text, *(tree[node] for node in path)])[len(text) :]
        assert_close(rows[[node + 1 for node in path]], expected)


class Chain:
    """A text that grows by a few tokens in each forward."""

    def __init__(self, model: LanguageModel, reference: ReferenceModel, key: str) -> None:
        self._sequence: Sequence = model.cache.open(key)
        self._reference = reference
        self._text: list[int] = []

    def feed(self, count: int) -> Feed:
        """Return the feed of the next tokens."""
        tokens = random_tokens(100 + len(self._text), count)
        self._text += tokens
        return Feed(self._sequence, tokens, count)

    def check(self, rows: torch.Tensor) -> None:
        """Compare the rows of the latest feed with the reference."""
        assert_close(rows, self._reference.logits(self._text)[-len(rows) :])


def check_hidden_states(model: LanguageModel, reference: ReferenceModel) -> None:
    """Compare the hidden states of a chain and a tree, at different layers in one forward."""
    text, tree, parents = random_tokens(1, TEXT_LENGTH), random_tokens(2, 5), (0, 0, 1, 3, 2)
    all_layers, some_layers = tuple(range(model.num_layers + 1)), (model.num_layers, 1)
    one, two, three = (model.cache.open(key) for key in ("one", "two", "three"))
    feeds = [
        Feed(one, text, 0, hidden_layers=all_layers, num_observed=len(text)),
        Feed(two, text, 1),
        Feed(three, [*text, *tree], 6, parents, some_layers, 3),
    ]
    states = model.forward(feeds).hidden_states
    assert states[1] is None
    assert states[0] is not None
    assert states[2] is not None
    assert_close(states[0], reference.outputs(text)[1])
    for row, node in enumerate((2, 3, 4)):
        path = [tree[index] for index in path_to(node + 1, parents)]
        assert_close(states[2][row], reference.outputs([*text, *path])[1][-1, list(some_layers)])
