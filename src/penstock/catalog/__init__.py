"""The catalog of a lake: its objects, their changes, their status, and rows as JSON."""

from typing import TYPE_CHECKING

from penstock.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.catalog.diff import Action, Change, bound_materializations, plan
    from penstock.catalog.inspect import (
        LakeInspector,
        LocationStatus,
        StoredTask,
        inspect_lake,
        list_collections,
    )
    from penstock.catalog.json_rows import encode_line, rows_of
    from penstock.catalog.namespace import (
        check_free,
        describe,
        listed_names,
        name_conflicts,
        names_of_source,
        progress_of_source,
        take_name_in_lake,
        user_location_is_locked,
    )
    from penstock.catalog.objects import (
        Object,
        RequestedObject,
        Type,
        known_objects,
        remove_object,
        to_requested,
        update_catalog,
    )
    from penstock.catalog.redaction import hides_secrets, objects_without_secrets

__all__ = [
    "Action",
    "Change",
    "LakeInspector",
    "LocationStatus",
    "Object",
    "RequestedObject",
    "StoredTask",
    "Type",
    "bound_materializations",
    "check_free",
    "describe",
    "encode_line",
    "hides_secrets",
    "inspect_lake",
    "known_objects",
    "list_collections",
    "listed_names",
    "name_conflicts",
    "names_of_source",
    "objects_without_secrets",
    "plan",
    "progress_of_source",
    "remove_object",
    "rows_of",
    "take_name_in_lake",
    "to_requested",
    "update_catalog",
    "user_location_is_locked",
]

if not TYPE_CHECKING:
    # Each command needs few of these modules, and some load the sources.
    __getattr__ = lazy_exports(
        __name__,
        diff=("Action", "Change", "bound_materializations", "plan"),
        inspect=(
            "LakeInspector",
            "LocationStatus",
            "StoredTask",
            "inspect_lake",
            "list_collections",
        ),
        json_rows=("encode_line", "rows_of"),
        namespace=(
            "check_free",
            "describe",
            "listed_names",
            "name_conflicts",
            "names_of_source",
            "progress_of_source",
            "take_name_in_lake",
            "user_location_is_locked",
        ),
        objects=(
            "Object",
            "RequestedObject",
            "Type",
            "known_objects",
            "remove_object",
            "to_requested",
            "update_catalog",
        ),
        redaction=("hides_secrets", "objects_without_secrets"),
    )
