"""Validate and Apply of the three connectors: a folder for each resource.

    FOLDER/NAME/resource.json   connector and materialization of the resource
    FOLDER/NAME/…               files of the connector

Validate and Apply read only `resource.json`, so all connectors share them.
"""

import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic import Field as Setting

from penstock.connectors.files.atomic_files import replace, sync
from penstock.sdk import (
    ApplyRequest,
    Binding,
    Connector,
    Constraint,
    ConstraintType,
    Field,
    OpenRequest,
    Refused,
    ValidatedBinding,
    ValidateRequest,
)

__all__ = ["Applied", "FilesConnector", "FilesEndpoint", "FilesResource", "last_applied"]


class FilesEndpoint(BaseModel):
    """Configuration of the endpoint."""

    model_config = ConfigDict(extra="forbid")

    folder: Path = Setting(description="folder of all resources; created if it does not exist")


class FilesResource(BaseModel):
    """Configuration of a resource."""

    model_config = ConfigDict(extra="forbid")

    name: str = Setting(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
        max_length=100,
        description="letters, digits, and _ . -; not . or - at the start",
    )


ResourceT = TypeVar("ResourceT", bound=FilesResource)


@dataclass(frozen=True, slots=True)
class Applied:
    """Contents of `resource.json`."""

    connector: str
    materialization: str
    delta_updates: bool
    contents: tuple[str, ...] = ()
    """Files and folders that the resource has from the start. Older folders list none."""

    def missing(self, folder: Path) -> list[str]:
        """Return the names of contents that were deleted from the folder of the resource."""
        return [name for name in self.contents if not (folder / name).exists()]


def last_applied(folder: Path) -> Applied | None:
    """Return the record of a folder; None if no connector has created it."""
    try:
        return Applied(**json.loads((folder / "resource.json").read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(
            f'could not read folder "{folder}": {error.strerror}',
            hint="Use a folder that is readable and writable.",
        ) from error
    except (ValueError, TypeError) as error:
        raise Refused(
            f'file "{folder / "resource.json"}" is damaged',
            hint="Restore the file, or use another resource.",
        ) from error


class FilesConnector(Connector[FilesEndpoint, ResourceT]):
    """Connector that stores documents in the files of a folder."""

    endpoint = FilesEndpoint
    accepts_empty: ClassVar[bool] = True

    @abstractmethod
    def delta_updates(self, resource: ResourceT) -> bool:
        """Return whether a resource has delta updates."""

    def make(self, folder: Path) -> None:
        """Create the files and folders that a resource has from the start, if they are missing."""

    # Validate.

    def validate(
        self, request: ValidateRequest[FilesEndpoint, ResourceT]
    ) -> Sequence[ValidatedBinding]:
        """Require the key and the root document. All other fields are optional."""
        _check_access(request.endpoint.folder)
        names = [binding.resource.name for binding in request.bindings]
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise Refused(
                f'resource "{min(duplicates)}" is bound twice',
                hint="Use a different resource for each binding.",
            )
        validated = []
        for binding in request.bindings:
            delta = self.delta_updates(binding.resource)
            folder = request.endpoint.folder / binding.resource.name
            last = last_applied(folder)
            self._check(last, binding.resource, delta)
            absent = last is None or bool(last.missing(folder))
            constraints = {field.name: _constraint(field) for field in binding.fields}
            path = (binding.resource.name,)
            validated.append(
                ValidatedBinding(constraints, path, delta, True, self.accepts_empty, absent=absent)
            )
        return validated

    def _check(self, last: Applied | None, resource: ResourceT, delta: bool) -> None:
        """Reject a resource of another connector or with other updates."""
        if last is not None and last.connector != self.name:
            raise Refused(
                f'resource "{resource.name}" belongs to connector "{last.connector}"',
                hint="Use another resource.",
            )
        if last is not None and last.delta_updates is not delta:
            kinds = {True: "delta updates", False: "standard updates"}
            raise Refused(
                f'resource "{resource.name}" has {kinds[last.delta_updates]} '
                f"and cannot change to {kinds[delta]}",
                hint="Use another resource, or delete the materialization first.",
            )

    # Apply.

    def apply(self, request: ApplyRequest[FilesEndpoint, ResourceT]) -> str:
        """Create the missing folders of resources."""
        missing = [binding for binding in request.bindings if self._must_make(request, binding)]
        if not request.dry_run:
            for binding in missing:
                self._make(request, binding)
        root = request.endpoint.folder
        return "".join(f'create folder "{root / binding.resource.name}"\n' for binding in missing)

    def _must_make(
        self,
        request: ApplyRequest[FilesEndpoint, ResourceT] | OpenRequest[FilesEndpoint, ResourceT],
        binding: Binding[ResourceT],
    ) -> bool:
        folder = request.endpoint.folder / binding.resource.name
        if (
            binding.path != (folder.name,)
            or binding.document is None
            or binding.delta_updates is not self.delta_updates(binding.resource)
        ):
            raise Refused(
                f'binding of resource "{folder.name}" differs from its validation',
                detail="The path, the root document or delta updates have changed.",
                hint="Validate again.",
            )
        last = last_applied(folder)
        self._check(last, binding.resource, binding.delta_updates)
        if last is not None and last.materialization != request.materialization:
            raise Refused(
                f'resource "{folder.name}" belongs to materialization "{last.materialization}"',
                hint="Use another resource.",
            )
        if last is None and folder.exists() and any(folder.iterdir()):
            raise Refused(
                f'folder "{folder}" exists, but no connector has created it',
                hint="Use another resource, or empty the folder.",
            )
        return last is None or bool(last.missing(folder))

    def _make(
        self, request: ApplyRequest[FilesEndpoint, ResourceT], binding: Binding[ResourceT]
    ) -> None:
        folder = request.endpoint.folder / binding.resource.name
        new = folder.with_name(f".{folder.name}.new")
        try:
            if last_applied(folder) is not None:
                self.make(folder)
                sync(folder)
                return
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            self.make(new)
            contents = tuple(sorted(path.name for path in new.iterdir()))
            about = Applied(self.name, request.materialization, binding.delta_updates, contents)
            replace(new / "resource.json", json.dumps(asdict(about)).encode())
            sync(new)
            new.replace(folder)  # Atomic: the complete folder exists, or nothing.
            for above in folder.parents[:2]:
                sync(above)
        except OSError as error:
            raise Refused(
                f'could not create folder "{folder}": {error.strerror}',
                hint="Use a folder that is readable and writable.",
            ) from error

    def delete(self, request: ApplyRequest[FilesEndpoint, ResourceT]) -> str:
        """Remove the folders that Apply created for these bindings."""
        ours = []
        for binding in request.bindings:
            folder = request.endpoint.folder / binding.resource.name
            last = last_applied(folder)
            if last is not None and last.materialization == request.materialization:
                ours.append(folder)
        if not request.dry_run:
            for folder in ours:
                old = folder.with_name(f".{folder.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                folder.replace(old)  # Atomic: the folder disappears at once.
                shutil.rmtree(old)
        return "".join(f'remove folder "{folder}"\n' for folder in ours)

    def folders(self, request: OpenRequest[FilesEndpoint, ResourceT]) -> list[Path]:
        """Return the folder of each binding.

        Raises:
            Refused: a binding was not applied.
        """
        for binding in request.bindings:
            if self._must_make(request, binding):
                raise Refused(
                    f'resource "{binding}" of materialization "{request.materialization}" '
                    "has not been applied",
                    hint="Apply the materialization first.",
                )
        return [request.endpoint.folder / binding.resource.name for binding in request.bindings]


def _check_access(folder: Path) -> None:
    """Check that the folder can be written or created, without changing it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    ids = os.access in os.supports_effective_ids
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK, effective_ids=ids):
        return
    state = "is not writable" if existing.is_dir() else "is not a folder"
    raise Refused(
        f'folder "{folder}" cannot be used: "{existing}" {state}',
        hint="Grant write permission, or use another folder in the endpoint.",
    )


def _constraint(field: Field) -> Constraint:
    if field.is_key:
        return Constraint(ConstraintType.LOCATION_REQUIRED, "the field is part of the key")
    if field.ptr == "":
        return Constraint(ConstraintType.LOCATION_REQUIRED, "the root document is stored")
    return Constraint(ConstraintType.FIELD_OPTIONAL, "the field is stored in the document")
