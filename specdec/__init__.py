"""Exact speculative decoding as gRPC microservices. Without extras, this package is the client.

    import specdec

    with specdec.Client("127.0.0.1:50051") as client:
        print(client.complete("Once upon a time", temperature=0.7, max_new_tokens=64).text)

The public names are those of `specdec.api`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import the client when a public name is first used, so that `specdec.cli` can set grpc's log level before."""
        if name[:1].isupper() or name == "__all__":  # public names are classes; others are modules of this package
            return getattr(importlib.import_module("specdec.api"), name)
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("specdec.api").__all__})
