"""One script for many keys at once: a pipeline to each server, for calls that come again soon if they fail now."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError, RedisError

from coordinator.stores.node import Node
from coordinator.stores.routes import Route
from coordinator.stores.scripts import Calls, ScriptText

Replies = list[Any]
MAX_TOGETHER = 256  # calls in one message: Redis serves nobody else meanwhile, for some 10 ms


async def execute_once(route: Route, script: ScriptText, calls: Calls) -> Replies:
    """Return the calls' replies in order; None for those that failed, whatever the reason."""
    places = await asyncio.gather(*(_found(route, keys[0]) for keys, _ in calls))
    by_node = defaultdict[Node, list[int]](list)
    for index, node in enumerate(places):
        if node is not None:
            by_node[node].append(index)
    replies: Replies = [None] * len(calls)

    async def execute(node: Node, indices: Sequence[int]) -> None:
        answers = await _executed(route, node, script, [calls[index] for index in indices])
        for index, answer in zip(indices, answers, strict=True):
            replies[index] = answer

    parts = [
        (node, indices[begin : begin + MAX_TOGETHER])
        for node, indices in by_node.items()
        for begin in range(0, len(indices), MAX_TOGETHER)
    ]
    await asyncio.gather(*(execute(node, indices) for node, indices in parts))
    return replies


async def _found(route: Route, key: str) -> Node | None:
    try:
        return await route.find(key)
    except (RedisError, OSError):
        return None


async def _executed(route: Route, node: Node, script: ScriptText, calls: Calls) -> Replies:
    """Execute calls at one server, the script loaded if it is unknown there; tell the route what failed."""
    commands = [script.call(keys, arguments) for keys, arguments in calls]
    try:
        async with node.turns:
            replies = await node.execute(commands)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                await node.execute([script.load()])
                replies = await node.execute(commands)  # those that were executed recognise their repetition
    except (RedisError, OSError) as error:
        failure = error if isinstance(error, RedisError) else RedisError(type(error).__name__)
        await route.failed(node, calls[0][0][0], failure)
        return [None] * len(calls)
    for (keys, _), reply in zip(calls, replies, strict=True):
        if isinstance(reply, RedisError):
            await route.failed(node, keys[0], reply)
    return [None if isinstance(reply, RedisError) else reply for reply in replies]
