"""Messages between a gateway and its model processes: JSON and bytes, preceded by their lengths."""

import json
import struct
from typing import Any

HEAD = struct.Struct("<QQ")


def frame(message: dict[str, Any], data: bytes = b"") -> bytes:
    header = json.dumps(message).encode()
    return HEAD.pack(len(header), len(data)) + header + data
