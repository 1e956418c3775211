"""Sockets that listen at a port, as those of gRPC do."""

import socket


def bind_port(host: str, port: int, backlog: int) -> socket.socket:
    """As gRPC binds: "::" is every address, also of IPv4, and on a machine without IPv6. Raises OSError."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=host == "::")
