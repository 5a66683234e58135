"""The command `specdec plan`: its flags, and what it prints."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from specdec.arguments import checked
from specdec.parameters import MAX_UINT32, Number, WholeNumber
from specdec.planning.acceptance import parse_acceptance
from specdec.planning.costs import Costs, parse_score_costs
from specdec.planning.plan import Plan, Planner

MAX_COST = 1e9
MAX_TOKENS = 256  # of a plan: the best tree of each size and depth takes time with their product
DESCRIPTION = (
    "How many draft tokens pay. A chain of K draft tokens, each accepted with probability a, commits "
    "(1 - a^(K+1)) / (1 - a) tokens a round on average; with a draft token that costs c of a scored one, that is "
    "(1 - a^(K+1)) / ((1 - a)(1 + K c)) times plain decoding (Leviathan et al. 2023). With --tree, the best tree of "
    "each size (Chen et al. 2024). Costs are in one unit of your choice, such as milliseconds. Each row is also "
    "simulated, round by round."
)


def add(commands: Any, finish: Callable[[argparse.ArgumentParser, Callable[[argparse.Namespace], None]], None]) -> None:
    """Add the command; `finish` tells its parser what it runs."""
    plan = commands.add_parser("plan", help="find how many draft tokens pay", description=DESCRIPTION)
    cost = checked(Number(0, MAX_COST, metavar="COST"))
    plan.add_argument(
        "--acceptance",
        required=True,
        type=typed(parse_acceptance),
        metavar="A[,A][/A]",
        help="the probability that a draft token after accepted ones is accepted: 0.8; by depth 0.8/0.7; by rank "
        "among siblings 0.6,0.2; deeper tokens are like the last depth",
    )
    plan.add_argument(
        "--draft-cost", required=True, type=cost, metavar="COST", help="of a draft token; of a tree, of a level"
    )
    plan.add_argument(
        "--score-cost",
        type=typed(parse_score_costs),
        default="1",
        metavar="COST|N:COST,...",
        help="of a scoring forward, or of forwards over N positions, between and beyond which lines are drawn: "
        "1:87,3:89,5:137 (default: 1)",
    )
    plan.add_argument(
        "--round-cost", type=cost, default=0.0, metavar="COST", help="of a round that drafts, besides (default: 0)"
    )
    plan.add_argument(
        "--max-draft-tokens", type=checked(WholeNumber(0, MAX_TOKENS)), default=8, metavar="COUNT", help="(default: 8)"
    )
    plan.add_argument("--tree", action="store_true", help="draft the best tree of each size, not a chain")
    plan.add_argument(
        "--rounds", type=checked(WholeNumber(1, 10_000_000)), default=20_000, help="simulated (default: 20000)"
    )
    plan.add_argument("--seed", type=checked(WholeNumber(0, MAX_UINT32)), default=0, help="(default: 0)")
    plan.add_argument("--json", action="store_true", help="print JSON")
    finish(plan, run)


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type whose errors are the parser's sentences."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def run(flags: argparse.Namespace) -> None:
    """Print all plans, and the best."""
    costs = Costs(flags.draft_cost, flags.score_cost, flags.round_cost)
    planner = Planner(flags.acceptance, costs, flags.rounds, flags.seed)
    plans = list((planner.trees if flags.tree else planner.chains)(flags.max_draft_tokens))
    if flags.json:
        print(json.dumps({"plans": [asdict(plan) for plan in plans], "best": asdict(best_of(plans))}))
    else:
        print("\n".join([*table(plans), sentence(plans)]))


def best_of(plans: Sequence[Plan]) -> Plan:
    """Return the fastest plan; of equal ones the one with the fewest draft tokens."""
    return max(plans, key=lambda plan: plan.speed_up)


def table(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield a line for each plan."""
    yield f"{'K':>3}  {'tokens per round':>16}  {'simulated':>18}  {'cost':>10}  {'speed-up':>8}  tokens at each depth"
    for plan in plans:
        simulated = f"{plan.simulated.tokens_per_round:.4f} +- {plan.simulated.standard_error:.4f}"
        yield (
            f"{plan.num_draft_tokens:>3}  {plan.tokens_per_round:>16.4f}  {simulated:>18}  {plan.cost:>10.4g}  "
            f"{plan.speed_up:>8.3f}  {' '.join(map(str, plan.widths)) or '-'}"
        )


def sentence(plans: Sequence[Plan]) -> str:
    """Return what the figures say."""
    best = best_of(plans)
    if not best.num_draft_tokens:
        return "best: K = 0, plain decoding: no draft pays"
    most = " (the maximum tried)" if best.num_draft_tokens == plans[-1].num_draft_tokens else ""
    gain = f"{best.tokens_per_round:.2f} tokens per round, {best.speed_up:.2f} times plain decoding"
    return f"best: K = {best.num_draft_tokens}{most}: {gain}"
