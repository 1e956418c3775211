"""The data plane: calls and bytes of entries on plain sockets, beside gRPC."""
