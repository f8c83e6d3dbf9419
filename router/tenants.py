"""Tenants: what each may have at once, and what it has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..worker.errors import ConfigurationError
from .drain import Drain

EVERY_OTHER_TENANT = "*"
"""In a table of limits: each tenant that is not named, by itself. Requests without a tenant are one such tenant."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Of one tenant, over all models. None is no limit. Raises ConfigurationError for impossible numbers."""

    weight: float = 1.0
    """Its share of the service, beside those of the other tenants that wait at the same priority."""
    max_running_requests: int | None = None
    """More than these wait for one of them to end."""
    max_queued_requests: int | None = None
    """More than these are refused."""

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < math.inf:
            raise ConfigurationError(f"a tenant's weight is {self.weight}; it must be a finite number above 0")
        if self.max_running_requests is not None and self.max_running_requests < 1:
            raise ConfigurationError(
                f"a tenant's max_running_requests is {self.max_running_requests}; it must be at least 1"
            )
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ConfigurationError(
                f"a tenant's max_queued_requests is {self.max_queued_requests}; it must be at least 0"
            )


class Account:
    """What a tenant has running and waiting."""

    __slots__ = ("drain", "limits", "num_running", "num_waiting", "tenant")

    def __init__(self, tenant: str | None, limits: TenantLimits) -> None:
        self.tenant = tenant
        self.limits = limits
        self.num_running = 0
        self.num_waiting = 0
        self.drain = Drain()

    @property
    def is_full(self) -> bool:
        """Whether nothing more of it may run now."""
        limit = self.limits.max_running_requests
        return limit is not None and self.num_running >= limit

    @property
    def may_queue(self) -> bool:
        """Whether one more of it may wait."""
        limit = self.limits.max_queued_requests
        return limit is None or self.num_waiting < limit


class Accounts:
    """The accounts of the tenants that have something running or waiting."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = dict(limits)
        self._default = self._limits.pop(EVERY_OTHER_TENANT, TenantLimits())
        self._accounts: dict[str | None, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def find(self, tenant: str | None) -> Account | None:
        return self._accounts.get(tenant)

    def open(self, tenant: str | None) -> Account:
        """The tenant's account, a new one if it has none."""
        account = self._accounts.get(tenant)
        if account is None:
            limits = self._default if tenant is None else self._limits.get(tenant, self._default)
            account = self._accounts[tenant] = Account(tenant, limits)
        return account

    def close_if_idle(self, account: Account) -> None:
        """Nothing is remembered of a tenant that has nothing here."""
        if account.num_running == 0 and account.num_waiting == 0:
            self._accounts.pop(account.tenant, None)
