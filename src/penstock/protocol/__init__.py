"""Messages between a runtime and a connector.

    messages, specs        requests, responses and task specifications as values
    wire, arena, protobuf  their encoding
    message_rules          validity of one message
    transaction            order of the messages of a stream
    key_range              key ranges of shards
    connector_state        connector state and its patches

The package does no I/O.
"""

import os

# SUBTLE: gRPC reads this variable once, when it is imported. All modules that import gRPC import
# this package first. Our own errors report failed handshakes and ports in use.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
