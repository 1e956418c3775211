"""What a gateway and its model processes say to each other on pipes: JSON, then bytes, each with its length."""

import json
import struct
from typing import Any

HEAD = struct.Struct("<QQ")


def frame(message: dict[str, Any], data: bytes = b"") -> bytes:
    said = json.dumps(message).encode()
    return HEAD.pack(len(said), len(data)) + said + data
