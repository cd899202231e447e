"""Redaction of the secrets of a configuration in displayed text.

A report shows the messages and output of connectors, which may repeat a password. A secret is found
by the name of its key, by the schema of the connector, or by its place in a URL or in a string such
as `host=db password=…`.

Text is truncated after redaction, never before: a partial secret would not be found.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from penstock.protocol.messages import SpecResponse
from penstock.protocol.redaction import SECRET_NAMES, redact_secrets, secret_fields, secrets_of
from penstock.testing.conformance.config import Config

__all__ = ["hider"]

_ASSIGNED: Final = re.compile(
    r"((?:passw|passphrase|pwd|secret|token|credential|(?:api|private|access|account)[_-]?key)"
    r"[\w-]*\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)",
    re.IGNORECASE,
)
_SHORTEST: Final = 4
"""Minimum length of a secret; a shorter text would match everywhere."""


def hider(config: Config, spec: SpecResponse | None = None) -> Callable[[str], str]:
    """Return a function that redacts the secrets of the configuration in any text.

    `spec`, if known, marks the fields that are secret.
    """
    marked = (
        frozenset[str]()
        if spec is None
        else secret_fields(spec.endpoint_spec_schema_json, spec.resource_spec_schema_json)
    )
    configs = [config.endpoint, config.resource, config.delta_resource]
    secrets = {config.token, *secrets_of(configs, marked)}
    for command in (config.command, config.read):
        secrets.update(secrets_of(list(command)), _option_values(command))
    long_enough = {secret for secret in secrets if len(secret) >= _SHORTEST}

    def hide(text: str) -> str:
        return _ASSIGNED.sub(r"\1***", redact_secrets(text, long_enough))

    return hide


def _option_values(command: Sequence[str]) -> Iterator[str]:
    """Yield the arguments after options that name a secret, as after `--password`."""
    for option, value in pairwise(command):
        if option.startswith("-") and SECRET_NAMES.search(option.lstrip("-")):
            yield value
