"""`specdec plan`: formulas agree with enumeration, simulation and the rule in production; odd input gets a sentence."""

import json
import random
from collections.abc import Iterator

import pytest

from specdec.exact.acceptance import TokenRule
from specdec.exact.values import Proposal, Scores, TargetDistribution, Uniforms, one_hot
from specdec.planning.acceptance import Acceptance, parse_acceptance
from specdec.planning.costs import Costs, ScoreCosts, parse_score_costs
from specdec.planning.plan import Plan, Planner
from specdec.planning.simulation import simulate
from specdec.planning.trees import Tree, best_tree, chain, tokens_per_round, widths
from tests.support.command_line import run

NUM_ROUNDS = 20_000
MAX_DEVIATION = 5.0  # standard errors
BY_RANK_AND_DEPTH = Acceptance(((0.6, 0.25, 0.1), (0.5, 0.3), (0.4, 0.2, 0.2)))
FREE = ScoreCosts(((1, 1.0),))


def planner(acceptance: Acceptance, draft_cost: float, score: ScoreCosts = FREE, drafted_round: float = 0.0) -> Planner:
    return Planner(acceptance, Costs(draft_cost, score, drafted_round), num_rounds=2, seed=0)


def best(plans: Iterator[Plan]) -> Plan:
    return max(plans, key=lambda plan: plan.speed_up)


# ---- formulas


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 8])
def test_chains_follow_the_closed_form(rate: float, num_tokens: int) -> None:
    """Leviathan et al. 2023, equation 1 and theorem 3.8."""
    [*_, plan] = planner(Acceptance(((rate,),)), 0.07).chains(num_tokens)
    expected = (1 - rate ** (num_tokens + 1)) / (1 - rate)
    assert plan.tokens_per_round == pytest.approx(expected)
    assert plan.speed_up == pytest.approx(expected / (1 + num_tokens * 0.07))


@pytest.mark.parametrize(("rate", "expected"), [(1.0, [1, 2, 3, 4]), (0.0, [1, 1, 1, 1])])
def test_certain_acceptance_and_none(rate: float, expected: list[float]) -> None:
    plans = list(planner(Acceptance(((rate,),)), 0.1).chains(3))
    assert [plan.tokens_per_round for plan in plans] == expected
    assert [plan.simulated.tokens_per_round for plan in plans] == expected
    assert best(iter(plans)).num_draft_tokens == (3 if rate else 0)


def paths_of_trees(num_ranks: int, num_nodes: int) -> set[frozenset[tuple[int, ...]]]:
    """Every tree of at most so many nodes, as the paths of its nodes."""
    trees: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(num_nodes):
        trees |= {
            tree | {(*parent, rank)}
            for tree in trees
            for parent in [(), *tree]
            for rank in range(num_ranks)
            if (*parent, rank) not in tree
        }
    return trees


def gain(path: tuple[int, ...], acceptance: Acceptance) -> float:
    result = 1.0
    for depth, rank in enumerate(path, start=1):
        ranks = acceptance.ranks(depth)
        result *= ranks[rank] if rank < len(ranks) else 0.0
    return result


@pytest.mark.parametrize(
    "acceptance", [BY_RANK_AND_DEPTH, Acceptance(((0.34, 0.33, 0.33),)), Acceptance(((0.9, 0.1),))]
)
@pytest.mark.parametrize("num_nodes", [1, 2, 4, 5])
@pytest.mark.parametrize("max_depth", [1, 2, 5])
def test_no_tree_is_better(acceptance: Acceptance, num_nodes: int, max_depth: int) -> None:
    trees = [tree for tree in paths_of_trees(3, num_nodes) if all(len(path) <= max_depth for path in tree)]
    values = [1 + sum(gain(path, acceptance) for path in tree) for tree in trees]
    found = best_tree(acceptance, num_nodes, max_depth)
    assert tokens_per_round(found) == pytest.approx(max(values))


def test_trees_are_chosen_by_speed() -> None:
    """A deep tree commits more; where a level of drafting costs much, a flat one is faster."""
    cheap, dear = (best(planner(BY_RANK_AND_DEPTH, cost).trees(6)) for cost in (0.001, 0.5))
    assert (cheap.widths, dear.widths) == ((2, 3, 1), (3,))
    assert cheap.tokens_per_round > dear.tokens_per_round


def test_chains_are_trees_of_one_rank() -> None:
    one_rank = Acceptance(((0.6,), (0.5,), (0.4,)))
    chains, trees = list(planner(BY_RANK_AND_DEPTH, 0.1).chains(5)), list(planner(one_rank, 0.1).trees(5))
    assert chains == trees
    assert widths(chain(BY_RANK_AND_DEPTH, 3)) == [1, 1, 1]


def test_costs_grow_with_positions() -> None:
    costs = parse_score_costs("1:80,3:90,5:130")
    assert [costs(count) for count in (1, 2, 3, 4, 5, 7)] == [80, 85, 90, 110, 130, 170]
    assert parse_score_costs("30")(9) == 30
    plans = list(planner(Acceptance(((0.9,),)), 4.0, costs, drafted_round=2.0).chains(2))
    assert [plan.cost for plan in plans] == [80, 85 + 4 + 2, 90 + 8 + 2]
    assert plans[2].speed_up == pytest.approx((1 + 0.9 + 0.81) * 80 / 100)


# ---- simulation


@pytest.mark.parametrize("rate", [0.6, 0.8, 0.97])
def test_simulated_chains_agree(rate: float) -> None:
    acceptance = Acceptance(((rate,),))
    tree = chain(acceptance, 4)
    simulated = simulate(tree, acceptance, NUM_ROUNDS, seed=1)
    assert abs(simulated.tokens_per_round - tokens_per_round(tree)) < MAX_DEVIATION * simulated.standard_error
    wrong = (1 - rate**4) / (1 - rate)  # as some tables have it, without the closing token
    assert abs(simulated.tokens_per_round - wrong) > MAX_DEVIATION * simulated.standard_error


@pytest.mark.parametrize("num_nodes", [1, 4, 12])
def test_simulated_trees_agree(num_nodes: int) -> None:
    tree = best_tree(BY_RANK_AND_DEPTH, num_nodes, num_nodes)
    simulated = simulate(tree, BY_RANK_AND_DEPTH, NUM_ROUNDS, seed=2)
    assert abs(simulated.tokens_per_round - tokens_per_round(tree)) < MAX_DEVIATION * simulated.standard_error


def proposal_of(tree: Tree) -> Proposal:
    """The tree as deterministic candidates; a token's id is its rank."""
    places = {(): 0} | {node.path: index for index, node in enumerate(tree, start=1)}
    tokens = tuple(node.path[-1] for node in tree)
    return Proposal(tokens, tuple(map(one_hot, tokens)), tuple(places[node.path[:-1]] for node in tree))


def scores_of(tree: Tree, acceptance: Acceptance) -> Scores:
    """A target that chooses each rank with its probability, and else a token that is never drafted."""
    depths = [0, *(node.depth for node in tree)]
    answers = []
    for depth, ids in zip(depths, proposal_of(tree).unions(), strict=True):
        probs = [acceptance.ranks(depth + 1)[token] for token in ids]
        answers.append(TargetDistribution(probs, 1 - sum(probs), 99))
    return Scores(tuple(answers))


def test_production_commits_as_planned() -> None:
    """The acceptance rule of the coordinator, with random uniforms."""
    tree = best_tree(BY_RANK_AND_DEPTH, 8, 8)
    proposal, scores, generator = proposal_of(tree), scores_of(tree, BY_RANK_AND_DEPTH), random.Random(3)
    num_rounds = 5_000
    total = 0
    for _ in range(num_rounds):
        uniforms = Uniforms(tuple(generator.random() for _ in tree), generator.random())
        total += len(TokenRule().accept(proposal, scores, uniforms).path) + 1
    error = simulate(tree, BY_RANK_AND_DEPTH, num_rounds, seed=4).standard_error
    assert abs(total / num_rounds - tokens_per_round(tree)) < MAX_DEVIATION * error


# ---- the command


def test_a_plan_is_printed() -> None:
    outcome = run("plan", "--draft-cost", "0.05", "--acceptance", "0.8", "--max-draft-tokens", "2", "--rounds", "1000")
    head, *rows, said = outcome.out.splitlines()
    assert " ".join(head.split()) == "K tokens per round simulated cost speed-up tokens at each depth"
    assert [row.split()[:2] for row in rows] == [["0", "1.0000"], ["1", "1.8000"], ["2", "2.4400"]]
    assert said == "best: K = 2 (the maximum tried): 2.44 tokens per round, 2.22 times plain decoding"
    assert outcome.err == ""


def test_useless_drafts_are_left_out() -> None:
    outcome = run("plan", "--draft-cost", "0.5", "--acceptance", "0.3", "--rounds", "10")
    assert outcome.out.endswith("best: K = 0, plain decoding: no draft pays\n")


def test_plans_are_printed_as_json() -> None:
    words = ["--draft-cost", "1", "--score-cost", "20", "--acceptance", "0.6,0.2", "--tree", "--rounds", "10", "--json"]
    content = json.loads(run("plan", *words).out)
    assert [plan["num_draft_tokens"] for plan in content["plans"]] == list(range(9))
    assert content["best"] in content["plans"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--acceptance", "1.1"], "--acceptance is '1.1'; give probabilities from 0 to 1"),
        (["--acceptance", "nan"], "--acceptance is 'nan'; give probabilities"),
        (["--acceptance", "half"], "--acceptance is 'half'; give probabilities"),
        (["--acceptance", ""], "--acceptance is ''; give probabilities"),
        (["--acceptance", "0.6,0.5"], "0.6,0.5 add up to 1.1, but at most one of the siblings is accepted"),
        (["--acceptance", "0.1,0.2"], "give the most probable rank first"),
        (["--draft-cost", "-1"], "--draft-cost is -1; give a number in [0,"),
        (["--draft-cost", "inf"], "--draft-cost is inf; give a number"),
        (["--score-cost", "0"], "--score-cost is '0'; costs of scoring are above 0"),
        (["--score-cost", "free"], "--score-cost is 'free'; give the cost of scoring one position"),
        (["--score-cost", "2:30"], "begin with 1 position, which is plain decoding"),
        (["--score-cost", "1:30,1:31"], "give each number of positions once, rising"),
        (["--score-cost", "1:30,2:20"], "it falls at its end"),
        (["--round-cost", "-0.1"], "--round-cost is -0.1; give a number"),
        (["--max-draft-tokens", "257"], "the maximum is 256"),
        (["--tree=3"], "--tree"),
    ],
)
def test_odd_input_gets_a_sentence(words: list[str], sentence: str) -> None:
    usual = {"--acceptance": "0.5", "--draft-cost": "0.1"}
    outcome = run("plan", *(word for pair in usual.items() if pair[0] != words[0] for word in pair), *words)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_depths_and_ranks_are_parsed() -> None:
    assert parse_acceptance("0.6,0.2/0.5") == Acceptance(((0.6, 0.2), (0.5,)))
    assert parse_acceptance("0.6,0.2/0.5").ranks(7) == (0.5,)
