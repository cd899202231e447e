"""`penstock schema` prints one JSON schema."""

import json

import jsonschema

from penstock.cli.schema import schema


def test_schema_command_prints_json_schema_of_pipeline_files(capsys):
    schema()
    printed = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(printed)
    validator = jsonschema.Draft202012Validator(printed)
    assert validator.is_valid({"location": "file:./lake"})
    assert not validator.is_valid({"location": "file:./lake", "tick": 1})
    described = printed["$defs"]["PostgresSection"]["properties"]
    assert {"url", "connection", "publication", "tables"} <= described.keys()
    assert all("description" in each for each in described.values())
