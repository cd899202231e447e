"""What a runtime and a connector say to each other, and in which order.

Values (`messages`, `specs`), their bytes (`wire`, and in bulk `arena`), what one
message must be (`message_rules`), which may follow which (`transaction`), who has which
keys (`key_range`), and how connector state adds up (`connector_state`). Pure: nothing here
opens a socket.
"""

import os

# SUBTLE: gRPC reads it once, when it is imported, and whoever imports gRPC comes by here first.
# What it would print of a failed handshake or a taken port is told by our own errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
