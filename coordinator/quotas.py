"""How much of this coordinator a tenant may take: a TOML file, read again within a second after it is replaced.

    [default]                  # of each tenant without a table of its own
    sessions = 64
    waiting = 16
    tokens_per_minute = 100000

    [tenants.acme]
    sessions = 256

What a table leaves out is not limited.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specdec.outside import REAL, Outside
from specdec.serving.security.bearer import TENANT
from specdec.serving.telemetry import get_logger
from specdec.watched import Watched, WatchedError, signature_of

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Quota:
    """One tenant's limits; None: no limit."""

    sessions: int | None = None  # that are generated at once
    waiting: int | None = None  # of these, that have no token yet
    tokens_per_minute: int | None = None  # of prompts and completions


NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """The limits of all tenants."""

    default: Quota = NO_QUOTA
    tenants: Mapping[str, Quota] = field(default_factory=dict)

    def of(self, tenant: str) -> Quota:
        """Return a tenant's limits."""
        return self.tenants.get(tenant, self.default)


def watched_quotas(path: Path | None) -> Callable[[], Quotas]:
    """Return what gives the quotas of the moment. Raises WatchedError for a file that cannot be used."""
    if path is None:
        return Quotas
    watched = Watched(lambda: signature_of([path]), lambda: read_quotas(path), _log_reload)
    return lambda: watched.value


def read_quotas(path: Path) -> Quotas:
    """Return the quotas of a file. Raises WatchedError, with what is wrong and what to write."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise WatchedError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WatchedError(f"{path} is not TOML: {error}") from None
    if unknown := sorted(set(tables) - {"default", "tenants"}):
        raise WatchedError(f"{path} has a table {unknown[0]}; give [default] and [tenants.NAME]")
    tenants = tables.get("tenants", {})
    if not isinstance(tenants, dict) or not all(map(TENANT.fullmatch, tenants)):
        raise WatchedError(f"{path}: tenants have tables, [tenants.NAME], with letters, digits and . @ : / _ -")
    own = {name: _quota(f"{path}: [tenants.{name}]", table) for name, table in tenants.items()}
    return Quotas(_quota(f"{path}: [default]", tables.get("default", {})), own)


def _quota(where: str, table: Any) -> Quota:
    known = [entry.name for entry in fields(Quota)]
    if not isinstance(table, dict) or not set(table) <= set(known):
        raise WatchedError(f"{where} may have {', '.join(known)} and nothing else")
    for name, value in table.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WatchedError(f"{where} says {name} = {value!r}; give a whole number from 1")
    return Quota(**table)


def _log_reload(problem: WatchedError | None) -> None:
    if problem is None:
        get_logger().info("quotas_reloaded")
    else:
        get_logger().error("quotas_refused", problem=str(problem))


class TokenBudgets:
    """What tenants have used of their tokens a minute: buckets of a minute's tokens that fill again steadily.

    A session that was let in goes on where its tenant's are used up: then new ones wait until the debt is paid.
    """

    def __init__(self, outside: Outside = REAL) -> None:
        self._outside = outside
        self._used: dict[str, float] = {}  # tokens that are not paid back yet
        self._at_s: dict[str, float] = {}  # when that was so

    def charge(self, tenant: str, num_tokens: int, per_minute: int | None) -> None:
        """Take note of tokens."""
        if per_minute is None:
            return
        self._used[tenant] = self._left_to_pay(tenant, per_minute) + num_tokens
        self._at_s[tenant] = self._outside.now_s()

    def wait_s(self, tenant: str, per_minute: int | None) -> float:
        """Return how long a new session has to wait; 0: not at all."""
        if per_minute is None or tenant not in self._at_s:
            return 0.0
        left = self._left_to_pay(tenant, per_minute)
        if left <= 0:
            del self._used[tenant], self._at_s[tenant]  # nothing is kept of who is away
        return max(0.0, (left - per_minute) / per_minute * MINUTE_S)

    def _left_to_pay(self, tenant: str, per_minute: int) -> float:
        if tenant not in self._used:
            return 0.0
        elapsed_s = self._outside.now_s() - self._at_s[tenant]
        return max(0.0, self._used[tenant] - per_minute * elapsed_s / MINUTE_S)
