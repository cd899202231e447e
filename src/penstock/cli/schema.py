"""`penstock schema`: what a pipeline's file may say, for editors."""

import json

__all__ = ["schema"]


def schema() -> None:
    """Print the JSON schema of a pipeline's file, for editors to complete and check it."""
    # Connectors bring gRPC along, which no other verb should wait for.
    from penstock.connectors import BUILT_IN, built_in
    from penstock.pipeline.json_schema import json_schema

    found = {name: built_in(name) for name in BUILT_IN}
    connectors = {
        name: (each.endpoint.model_json_schema(), each.resource.model_json_schema())
        for name, each in found.items()
    }
    print(json.dumps(json_schema(connectors), indent=2, ensure_ascii=False))
