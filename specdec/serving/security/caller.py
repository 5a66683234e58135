"""The tenant that the call of the moment belongs to. It comes from the caller's token and from nowhere else."""

from contextvars import ContextVar

NO_TENANT = ""  # where clients are not authenticated, all of them are one

_tenant: ContextVar[str] = ContextVar("tenant", default=NO_TENANT)


def current_tenant() -> str:
    """Return the tenant of the call that this task serves; NO_TENANT where clients are not authenticated."""
    return _tenant.get()


def set_tenant(tenant: str) -> None:
    """Set the tenant for the rest of this task: a gate has let the call in."""
    _tenant.set(tenant)
