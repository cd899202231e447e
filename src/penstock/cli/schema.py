"""`penstock schema`: JSON schema of the pipeline file."""

import json

__all__ = ["schema"]


def schema() -> None:
    """Print the JSON schema of the pipeline file, for completion and checks in an editor."""
    # Imported late: connectors import gRPC, which is slow to load.
    from penstock.connectors import BUILT_IN, built_in
    from penstock.pipeline import file_schema

    connectors = {name: built_in(name) for name in BUILT_IN}
    schemas = {
        name: (connector.endpoint.model_json_schema(), connector.resource.model_json_schema())
        for name, connector in connectors.items()
    }
    print(json.dumps(file_schema(schemas), indent=2, ensure_ascii=False))
