"""What the three have in common: a folder, in which each resource has its own.

    FOLDER/NAME/resource.json   which connector and materialization it is of
    FOLDER/NAME/…               what the connector keeps

Validate and Apply look at `resource.json` alone, so they are the same for all.
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
    """Which folder."""

    model_config = ConfigDict(extra="forbid")

    folder: Path = Setting(description="the folder of all resources; it is made if it is not there")


class FilesResource(BaseModel):
    """What the folder of a collection is called."""

    model_config = ConfigDict(extra="forbid")

    name: str = Setting(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$",
        max_length=100,
        description="letters, digits, and _ . - within",
    )


ResourceT = TypeVar("ResourceT", bound=FilesResource)


@dataclass(frozen=True, slots=True)
class Applied:
    """What `resource.json` says."""

    connector: str
    materialization: str
    delta_updates: bool
    contents: tuple[str, ...] = ()
    """Files and folders that the resource has from the start. Older folders list none."""

    def missing(self, folder: Path) -> list[str]:
        """Return the names of contents that were deleted from the folder of the resource."""
        return [name for name in self.contents if not (folder / name).exists()]


def last_applied(folder: Path) -> Applied | None:
    """What a folder was made for; none, if it was not made by one of us."""
    try:
        return Applied(**json.loads((folder / "resource.json").read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(
            f'folder "{folder}" cannot be read: {error.strerror}',
            hint="Name a folder that can be read and written.",
        ) from error
    except (ValueError, TypeError) as error:
        raise Refused(
            f'"{folder / "resource.json"}" is not what a connector wrote',
            hint="Restore it, or name another resource.",
        ) from error


class FilesConnector(Connector[FilesEndpoint, ResourceT]):
    """Documents in the files of a folder."""

    endpoint = FilesEndpoint
    accepts_empty: ClassVar[bool] = True

    @abstractmethod
    def delta_updates(self, resource: ResourceT) -> bool:
        """Whether every document is kept, instead of the last by key."""

    def make(self, folder: Path) -> None:
        """Create the files and folders that a resource has from the start, if they are missing."""

    # Validate.

    def validate(
        self, request: ValidateRequest[FilesEndpoint, ResourceT]
    ) -> Sequence[ValidatedBinding]:
        """Every field can be taken, for it is in the document; the key and that must be."""
        _check_access(request.endpoint.folder)
        names = [each.resource.name for each in request.bindings]
        if twice := {name for name in names if names.count(name) > 1}:
            raise Refused(
                f'resource "{min(twice)}" is bound twice',
                hint="Give each binding a name of its own.",
            )
        found = []
        for each in request.bindings:
            delta = self.delta_updates(each.resource)
            folder = request.endpoint.folder / each.resource.name
            last = last_applied(folder)
            self._check(last, each.resource, delta)
            absent = last is None or bool(last.missing(folder))
            constraints = {field.name: _constraint(field) for field in each.fields}
            path = (each.resource.name,)
            found.append(
                ValidatedBinding(constraints, path, delta, True, self.accepts_empty, absent=absent)
            )
        return found

    def _check(self, last: Applied | None, resource: ResourceT, delta: bool) -> None:
        """See that what is there can take what shall come."""
        if last is not None and last.connector != self.name:
            raise Refused(
                f'resource "{resource.name}" is of connector "{last.connector}"',
                hint="Name another.",
            )
        if last is not None and last.delta_updates is not delta:
            kinds = {True: "delta updates", False: "the last document by key"}
            raise Refused(
                f'resource "{resource.name}" keeps {kinds[last.delta_updates]}, '
                f"and cannot change to {kinds[delta]}",
                hint="Name another, or delete the materialization first.",
            )

    # Apply.

    def apply(self, request: ApplyRequest[FilesEndpoint, ResourceT]) -> str:
        """Make a folder for each resource that has none."""
        missing = [each for each in request.bindings if self._must_make(request, each)]
        if not request.dry_run:
            for each in missing:
                self._make(request, each)
        root = request.endpoint.folder
        return "".join(f'make folder "{root / each.resource.name}"\n' for each in missing)

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
                f'the binding of resource "{folder.name}" is not as it was validated',
                detail="That is of its path, of the whole document, and of delta updates.",
                hint="Validate again.",
            )
        last = last_applied(folder)
        self._check(last, binding.resource, binding.delta_updates)
        if last is not None and last.materialization != request.materialization:
            raise Refused(
                f'resource "{folder.name}" is of materialization "{last.materialization}"',
                hint="Name another.",
            )
        if last is None and folder.exists() and any(folder.iterdir()):
            raise Refused(
                f'"{folder}" is there, and was made by nobody we know',
                hint="Name another resource, or empty the folder.",
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
            contents = tuple(sorted(each.name for each in new.iterdir()))
            about = Applied(self.name, request.materialization, binding.delta_updates, contents)
            replace(new / "resource.json", json.dumps(asdict(about)).encode())
            sync(new)
            new.replace(folder)  # All of it is there, or nothing.
            for above in folder.parents[:2]:
                sync(above)
        except OSError as error:
            raise Refused(
                f'folder "{folder}" cannot be made: {error.strerror}',
                hint="Name a folder that can be read and written.",
            ) from error

    def delete(self, request: ApplyRequest[FilesEndpoint, ResourceT]) -> str:
        """Take away the folders that were made for these bindings."""
        ours = []
        for each in request.bindings:
            folder = request.endpoint.folder / each.resource.name
            last = last_applied(folder)
            if last is not None and last.materialization == request.materialization:
                ours.append(folder)
        if not request.dry_run:
            for folder in ours:
                old = folder.with_name(f".{folder.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                folder.replace(old)  # It is gone at once, or not yet.
                shutil.rmtree(old)
        return "".join(f'remove folder "{each}"\n' for each in ours)

    def folders(self, request: OpenRequest[FilesEndpoint, ResourceT]) -> list[Path]:
        """The folder of each binding.

        Raises:
            Refused: one was not applied.
        """
        for each in request.bindings:
            if self._must_make(request, each):
                raise Refused(
                    f'resource "{each}" of materialization "{request.materialization}" '
                    "has not been applied",
                    hint="Apply it first.",
                )
        return [request.endpoint.folder / each.resource.name for each in request.bindings]


def _check_access(folder: Path) -> None:
    """Check that the folder can be written, or created, without touching it."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    ids = os.access in os.supports_effective_ids
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK, effective_ids=ids):
        return
    state = "is not writable" if existing.is_dir() else "is not a folder"
    raise Refused(
        f'folder "{folder}" cannot be used: "{existing}" {state}',
        hint="Grant write permission, or name another folder in the endpoint.",
    )


def _constraint(field: Field) -> Constraint:
    if field.is_key:
        return Constraint(ConstraintType.LOCATION_REQUIRED, "it is of the key")
    if field.ptr == "":
        return Constraint(ConstraintType.LOCATION_REQUIRED, "the whole document is kept")
    return Constraint(ConstraintType.FIELD_OPTIONAL, "it is kept within the document")
