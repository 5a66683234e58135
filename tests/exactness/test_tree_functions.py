"""Trees as parents, against definitions by recursion."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.exact import tree


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(0, 12))
    return tuple(draw(st.integers(0, node)) for node in range(size))


def path(parents: tuple[int, ...], node: int) -> list[int]:
    """The path to a node as `parents` counts, root excluded."""
    return [] if node == 0 else [*path(parents, parents[node - 1]), node]


@given(parents=trees())
@settings(deadline=None, derandomize=True)
def test_depths_and_ancestors_follow_paths(parents: tuple[int, ...]) -> None:
    paths = [path(parents, node + 1) for node in range(len(parents))]
    assert tree.depths_of(parents) == [len(nodes) for nodes in paths]
    assert [tree.path_to(node + 1, parents) for node in range(len(parents))] == [
        [n - 1 for n in nodes] for nodes in paths
    ]
    matrix = tree.ancestor_matrix(parents)
    assert matrix.tolist() == [[other + 1 in nodes for other in range(len(parents))] for nodes in paths]


@given(parents=trees(), data=st.data())
@settings(deadline=None, derandomize=True)
def test_longest_path_spells_most_tokens(parents: tuple[int, ...], data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 1), min_size=len(parents), max_size=len(parents)))
    wanted = data.draw(st.lists(st.integers(0, 1), max_size=8))
    root = data.draw(st.integers(0, len(parents)))
    below = [path(parents, node + 1) for node in range(len(parents))]
    candidates = [nodes[nodes.index(root) + 1 :] for nodes in below if root in nodes] if root else below
    fitting = [nodes for nodes in candidates if [tokens[node - 1] for node in nodes] == wanted[: len(nodes)] and nodes]
    found = tree.longest_path(parents, tokens, root, wanted)
    assert len(found) == max(map(len, fitting), default=0)
    assert not found or [node + 1 for node in found] in fitting


@given(parents=trees())
@settings(deadline=None, derandomize=True)
def test_chain_length_counts_leading_chain(parents: tuple[int, ...]) -> None:
    length = tree.chain_length(parents)
    assert parents[:length] == tuple(range(length))
    assert length == len(parents) or parents[length] != length


@given(parents=trees())
@settings(deadline=None, derandomize=True)
def test_children_are_in_order(parents: tuple[int, ...]) -> None:
    assert tree.is_tree(parents)
    for position, children in enumerate(tree.children_of(parents)):
        assert children == [token for token, parent in enumerate(parents) if parent == position]


@pytest.mark.parametrize("parents", [(1,), (0, 2), (-1,), (0, 1, 5)])
def test_children_before_parents_are_no_tree(parents: tuple[int, ...]) -> None:
    assert not tree.is_tree(parents)


def test_unions_keep_the_first_appearance() -> None:
    assert tree.union([(5, 2), (2, 7), (5,)]) == (5, 2, 7)
