"""Python's lookups of names in a pod's process: HOSTS_FILE has a line for each, `name address`."""

import os
import socket
from pathlib import Path
from typing import Any

_HOSTS = dict(line.split() for line in Path(os.environ["HOSTS_FILE"]).read_text().splitlines())
_getaddrinfo = socket.getaddrinfo


def _from_file(host: Any, *arguments: Any, **options: Any) -> Any:
    return _getaddrinfo(_HOSTS.get(host, host), *arguments, **options)


socket.getaddrinfo = _from_file
