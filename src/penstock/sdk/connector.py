"""The contract of a connector.

    class Connector(penstock.sdk.Connector[Endpoint, Resource]):
        name = "mine"
        endpoint, resource = Endpoint, Resource     # pydantic models of the configuration

        def validate(self, request): …    constraints on fields, and paths of resources
        def apply(self, request): …       create or alter resources; or only describe it
        def open(self, request): …        a `Transactor` for one key range

One connector serves many streams. It has no state between calls.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as part
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from penstock.protocol.key_range import KeyRange
from penstock.protocol.messages import ValidatedBinding
from penstock.protocol.specs import CollectionSpec, MaterializationSpec
from penstock.sdk.bindings import Binding, Field
from penstock.sdk.errors import Refused
from penstock.sdk.transactor import Transactor

__all__ = ["ApplyRequest", "Connector", "OpenRequest", "RequestedBinding", "ValidateRequest"]

EndpointT = TypeVar("EndpointT", bound=BaseModel)
ResourceT = TypeVar("ResourceT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RequestedBinding(Generic[ResourceT]):
    """Proposed binding of a collection, with all its fields."""

    resource: ResourceT
    collection: CollectionSpec
    fields: Sequence[Field]
    replaces: bool = False
    """True if the next transaction replaces all rows. Then `ValidatedBinding.rows` counts them."""


@dataclass(frozen=True, slots=True)
class ValidateRequest(Generic[EndpointT, ResourceT]):
    """Argument of `Connector.validate`."""

    materialization: str
    endpoint: EndpointT
    bindings: Sequence[RequestedBinding[ResourceT]]


@dataclass(frozen=True, slots=True)
class ApplyRequest(Generic[EndpointT, ResourceT]):
    """Argument of `Connector.apply` and `Connector.delete`."""

    materialization: str
    version: str
    endpoint: EndpointT
    bindings: Sequence[Binding[ResourceT]]
    dry_run: bool
    spec: MaterializationSpec
    """Built specification, to store and compare with the next one."""

    recreates: frozenset[int] = frozenset()
    """Indexes of bindings whose resource may be dropped and created again: not by `apply`, but in
    the first transaction that truncates it."""


@dataclass(frozen=True, slots=True)
class OpenRequest(Generic[EndpointT, ResourceT]):
    """Argument of `Connector.open`."""

    materialization: str
    version: str
    endpoint: EndpointT
    bindings: Sequence[Binding[ResourceT]]
    key_range: KeyRange
    state: dict[str, Any]
    """Connector state in the recovery log."""

    cancelled: threading.Event = part(default_factory=threading.Event)
    """Set when the stream ends before `open` returns. Waits in `open` must then end."""


class Connector(ABC, Generic[EndpointT, ResourceT]):
    """Writes documents to one kind of endpoint."""

    name: ClassVar[str]
    documentation_url: ClassVar[str]
    """URL of the documentation. A relative URL refers to the working directory of the server."""

    endpoint: type[EndpointT]
    """Model of the endpoint configuration. Secrets are `pydantic.SecretStr`."""

    resource: type[ResourceT]
    """Model of the resource configuration. Secrets are `pydantic.SecretStr`."""

    @abstractmethod
    def validate(
        self, request: ValidateRequest[EndpointT, ResourceT]
    ) -> Sequence[ValidatedBinding]:
        """Return the constraints on the fields of each binding, in the order of the request.

        Raises:
            Refused: the bindings cannot be materialized. The hint gives the remedy.
        """

    @abstractmethod
    def apply(self, request: ApplyRequest[EndpointT, ResourceT]) -> str:
        """Create or alter the resources, and return a description; empty if nothing changed.

        Raises:
            Refused: the resources cannot be altered. Nothing was changed.
        """

    def delete(self, request: ApplyRequest[EndpointT, ResourceT]) -> str:
        """Drop the applied resources, and return a description."""
        raise Refused(
            f'connector "{self.name}" cannot drop resources',
            hint="Drop the resources in the endpoint.",
        )

    @abstractmethod
    def open(self, request: OpenRequest[EndpointT, ResourceT]) -> Transactor:
        """Return the writer of a key range, and fence all previous writers of its keys.

        The SDK cannot call `Transactor.cancel` before this method returns. If this method waits,
        it must also wait for `request.cancelled`.
        """
