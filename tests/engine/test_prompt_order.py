"""Which prompt is read next."""

from specdec.engine.prompt_order import Prompt, PromptOrder


def test_short_prompts_come_first() -> None:
    prompts = [Prompt("long", "", 10.0, 0.0), Prompt("short", "", 0.2, 0.0), Prompt("middle", "", 1.0, 0.0)]
    assert PromptOrder().ordered(prompts) == ["short", "middle", "long"]


def test_waiting_makes_long_prompts_urgent() -> None:
    prompts = [Prompt("long", "", 10.0, 9.9), Prompt("short", "", 0.2, 0.0)]
    assert PromptOrder().ordered(prompts) == ["long", "short"]


def test_groups_take_turns_by_what_was_read() -> None:
    order = PromptOrder()
    greedy = [Prompt(f"a{number}", "a", 1.0, 50.0) for number in range(50)]
    assert order.ordered([*greedy, Prompt("b", "b", 1.0, 0.0)]).index("b") <= 1
    order.charge("a", 1.0)
    assert order.ordered([*greedy, Prompt("b", "b", 5.0, 0.0)])[0] == "b"


def test_served_groups_get_equal_shares() -> None:
    order, read = PromptOrder(), {"a": 0.0, "b": 0.0}
    for _ in range(100):
        prompts = [Prompt("a", "a", 1.0, 0.0) for _ in range(50)] + [Prompt("b", "b", 1.0, 0.0)]
        group = order.ordered(prompts)[0]
        order.charge(group, 0.1)
        read[group] += 0.1
    assert abs(read["a"] - read["b"]) < 0.2


def test_nobody_saves_up_while_away() -> None:
    order = PromptOrder()
    both = [Prompt("a", "a", 1.0, 0.0), Prompt("b", "b", 1.0, 0.0)]
    order.ordered(both)
    for _ in range(100):
        order.ordered(both[:1])
        order.charge("a", 1.0)
    order.ordered(both)
    order.charge("b", 0.5)
    assert order.ordered(both)[0] == "a", "b came back level with a, and was served since"
