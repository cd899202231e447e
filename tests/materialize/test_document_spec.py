"""The collection spec of documents: projections, keys and types from the JSON schema."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.materialize.document_fields import build_document_spec, field_defaults
from penstock.protocol.specs import Exists, Inference, StringInference

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["id", "inner"],
    "reduce": {"strategy": "merge"},
    "properties": {
        "id": {"type": "integer"},
        "part": {"type": ["string", "null"], "default": ""},
        "inner": {
            "type": "object",
            "required": ["at"],
            "properties": {"at": {"type": "string", "format": "date-time"}},
        },
        "n": {"type": "number", "reduce": {"strategy": "sum"}},
        "price": {"type": "number"},
        "some": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "never": False,
    },
    "additionalProperties": False,
}

# The vectors describe their keys only in prose.
KEYS = {
    "keyval-02": ("/price", 'key "/price" of collection "c" may be of type number'),
    "keyval-03": ("/inner", 'key "/inner" of collection "c" may be of type object'),
    "keyval-06": ("/inner/else", 'key "/inner/else" of collection "c" is not in its schema'),
}
CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "flow.json").read_text())[
        "cases"
    ]
    if case["kind"] == "collection_key_validation"
}


def spec(key: list[str], projections: dict[str, str] | None = None, **changed: Any) -> Any:
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], **changed}}
    return build_document_spec("c", schema, key, projections or {})


def test_document_spec_projects_every_named_location_as_field():
    made = spec(["/inner/at", "/id"])
    assert [(each.field, each.ptr) for each in made.projections] == [
        ("id", "/id"),
        ("part", "/part"),
        ("inner", "/inner"),
        ("inner/at", "/inner/at"),
        ("n", "/n"),
        ("price", "/price"),
        ("some", "/some"),
        ("list", "/list"),
        ("flow_document", ""),
    ]
    assert made.key_ptrs == ("/inner/at", "/id")
    assert [each.field for each in made.projections if each.is_primary_key] == ["id", "inner/at"]
    assert not any(each.explicit for each in made.projections)
    assert made.schema() == SCHEMA
    at, document = made.projection("inner/at"), made.projection("flow_document")
    assert at is not None
    assert document is not None
    assert at.inference == Inference(
        ("string",), StringInference(format="date-time"), exists=Exists.MUST
    )
    assert document.inference == Inference(("object",), exists=Exists.MUST)


def test_document_spec_with_projections_adds_explicit_fields():
    made = spec(["/id"], {"when": "/inner/at", "first": "/list/0", "id": "/id", "doc": ""})
    explicit = {each.field: each.ptr for each in made.projections if each.explicit}
    assert explicit == {"when": "/inner/at", "first": "/list/0", "id": "/id", "doc": ""}
    assert len({each.field for each in made.projections}) == len(made.projections)
    assert {each.field for each in made.projections if each.ptr == ""} == {"doc", "flow_document"}


@pytest.mark.parametrize(
    ("field", "pointer", "message"),
    [
        ("id", "/some", 'projection "id" of collection "c" is of "/some", but its name belongs'),
        ("flow_document", "/id", 'projection "flow_document" of collection "c" is of "/id", but'),
        ("x", "/never", 'projection "x" of collection "c" is of "/never", which cannot exist'),
        ("x", "/inner/x", 'projection "x" of collection "c" is of "/inner/x", which is not in'),
        ("x", "inner", 'location "inner" is not a JSON pointer'),
    ],
)
def test_document_spec_with_invalid_projection_raises_usage_error(
    field: str, pointer: str, message: str
):
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        spec(["/id"], {field: pointer})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("pointer", "message"),
    [
        ("/never", 'key "/never" of collection "c" cannot exist'),
        ("/some", 'key "/some" of collection "c" may be absent'),
        ("/nullable", 'key "/nullable" of collection "c" may be of type null'),
        ("/summed", 'key "/summed" of collection "c" is reduced by sum'),
        ("/odd", 'key "/odd" of collection "c" has a default that cannot be part of a key'),
        ("id", 'key "id" is not a JSON pointer'),
    ],
)
def test_document_spec_with_invalid_key_raises_usage_error(pointer: str, message: str):
    properties = {
        **SCHEMA["properties"],
        "nullable": {"type": ["string", "null"]},
        "summed": {"type": "integer", "reduce": {"strategy": "sum"}},
        "odd": {"type": "integer", "default": 0.5},
    }
    schema = {**SCHEMA, "properties": properties, "required": ["id", "nullable", "summed"]}
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        build_document_spec("c", schema, [pointer], {})
    assert caught.value.hint


@pytest.mark.parametrize("id", sorted(CASES))
def test_document_spec_rejects_keys_that_flow_rejects(id: str):
    assert CASES[id]["expect"]["outcome"].startswith("error: Key")
    pointer, message = KEYS[id]
    required = {**SCHEMA, "required": [*SCHEMA["required"], "price"]}
    with pytest.raises(UsageError, match=f"^{message}"):
        build_document_spec("c", required, [pointer], {})


def test_document_spec_accepts_optional_key_that_has_default():
    made = spec(["/id", "/part"])
    assert made.key_ptrs == ("/id", "/part")
    assert field_defaults(made) == {"/part": ""}


def test_property_named_flow_document_yields_name_to_root_document():
    made = spec(["/id"], {"theirs": "/flow_document"}, flow_document={"type": "string"})
    found = {each.field: each.ptr for each in made.projections}
    assert found["flow_document"] == ""
    assert found["theirs"] == "/flow_document"
