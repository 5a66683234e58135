"""Mistakes that tests seed into an overlay: how to make each, and the problem that must be found."""

from collections.abc import Callable

from tests.support.manifests import (
    Document,
    containers,
    named,
)

Change = Callable[[list[Document]], object]
MISTAKES: list[tuple[str, str, Change, str]] = []


def mistake(overlay: str, expected: str) -> Callable[[Change], Change]:
    """Register a function that breaks an overlay."""

    def register(change: Change) -> Change:
        MISTAKES.append((change.__name__, overlay, change, expected))
        return change

    return register


def deployment(documents: list[Document], name: str) -> Document:
    return named(documents, "Deployment", name)


def container(documents: list[Document], name: str) -> Document:
    return containers(deployment(documents, name))[0]


def variables(documents: list[Document], name: str) -> dict[str, str]:
    source = container(documents, name)["envFrom"][0]["configMapRef"]["name"]
    data: dict[str, str] = named(documents, "ConfigMap", source)["data"]
    return data
