"""What a connector is.

    class Connector(penstock.sdk.Connector[Endpoint, Resource]):
        name = "mine"
        endpoint, resource = Endpoint, Resource     # pydantic models: what users configure

        def validate(self, asked): …    which fields can be taken, and where they would go
        def apply(self, applying): …    make the endpoint fit; a dry run only says what
        def open(self, opening): …      a `Transactor` for one range of keys

One connector serves many streams; it keeps nothing between calls.
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

__all__ = ["Applying", "Asked", "Connector", "Opening", "Validating"]

EndpointT = TypeVar("EndpointT", bound=BaseModel)
ResourceT = TypeVar("ResourceT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Asked(Generic[ResourceT]):
    """One collection that shall be bound, with every field it could bring."""

    resource: ResourceT
    collection: CollectionSpec
    fields: Sequence[Field]
    replaces: bool = False
    """Whether the next transaction replaces all rows: the answer says how many there are."""


@dataclass(frozen=True, slots=True)
class Validating(Generic[EndpointT, ResourceT]):
    """What is asked of `validate`."""

    materialization: str
    endpoint: EndpointT
    bindings: Sequence[Asked[ResourceT]]


@dataclass(frozen=True, slots=True)
class Applying(Generic[EndpointT, ResourceT]):
    """What is asked of `apply` and `delete`."""

    materialization: str
    version: str
    endpoint: EndpointT
    bindings: Sequence[Binding[ResourceT]]
    dry_run: bool
    spec: MaterializationSpec
    """The whole of what was built, to be kept and compared with."""

    recreates: frozenset[int] = frozenset()
    """Indexes of bindings whose resources may be dropped and created again, not by `apply` but
    within the first transaction that empties them."""


@dataclass(frozen=True, slots=True)
class Opening(Generic[EndpointT, ResourceT]):
    """What is asked of `open`."""

    materialization: str
    version: str
    endpoint: EndpointT
    bindings: Sequence[Binding[ResourceT]]
    key_range: KeyRange
    state: dict[str, Any]
    """Connector state, as the recovery log has it."""

    broken_off: threading.Event = part(default_factory=threading.Event)
    """Set when the stream is over, though `open` has not returned: what waits is to give up."""


class Connector(ABC, Generic[EndpointT, ResourceT]):
    """Brings documents to one kind of endpoint."""

    name: ClassVar[str]
    documentation_url: ClassVar[str]
    """A relative one is of the folder that the connector is served in."""

    endpoint: type[EndpointT]
    """How users configure the endpoint; secrets are `pydantic.SecretStr`."""

    resource: type[ResourceT]
    """How users configure where in the endpoint a collection goes; secrets likewise."""

    @abstractmethod
    def validate(self, asked: Validating[EndpointT, ResourceT]) -> Sequence[ValidatedBinding]:
        """For each binding, in the same order, what is asked of its fields.

        Raises:
            Refused: it cannot be materialized so, and what to do about it.
        """

    @abstractmethod
    def apply(self, applying: Applying[EndpointT, ResourceT]) -> str:
        """Make the endpoint fit, and say what was done; nothing, if there was nothing to do.

        Raises:
            Refused: it cannot be made to fit; nothing was changed.
        """

    def delete(self, applying: Applying[EndpointT, ResourceT]) -> str:
        """Take away what was applied, and say what was done."""
        raise Refused(
            f'connector "{self.name}" cannot remove what it has made',
            hint="Remove it in the endpoint itself.",
        )

    @abstractmethod
    def open(self, opening: Opening[EndpointT, ResourceT]) -> Transactor:
        """The writer of a range of keys; whoever wrote any of them before is fenced off.

        `Transactor.cancel` can break off nothing before there is a transactor. Until then
        `opening.broken_off` is what to look at, or to wait for, where this waits.
        """
