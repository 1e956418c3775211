"""What a signature is over: nothing of an entry's names and numbers can be another's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker.transfer.signatures import Signer
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import Entry
from fusionkv.protos.runtime.checksum import checksum


@pytest.mark.parametrize(
    "changed", ["namespace", "system", "chunk", "first", "key", "variant", "checksum", "seal", "numbers"]
)
def test_everything_is_signed(changed: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("11" * 32)
    signer, path = Signer(tmp_path / "keys"), [b"s" * 32, b"a" * 32, b"c" * 32]
    signature = signer.sign(b"n" * 32, path, b"v" * 32, memoryview(bytes(100)), tokens=3, base=7)
    assert len(signature) == 48
    key = keys.entry_key(b"n" * 32, path, b"v" * 32)
    entry = Entry(key, 100, 3, 7, checksum(bytes(100)), "memory", b"v" * 32, signature=signature)
    names: list[Any] = [b"n" * 32, b"s" * 32, b"c" * 32, False]
    assert signer.fault(*names, entry) == ""
    others: list[tuple[list[Any], Entry]] = []
    if changed in ("namespace", "system", "chunk", "first"):
        at = ("namespace", "system", "chunk", "first").index(changed)
        others = [([*names[:at], True if changed == "first" else b"o" * 32, *names[at + 1 :]], entry)]
    elif changed == "seal":
        flipped = (signature[:at] + bytes([signature[at] ^ 1]) + signature[at + 1 :] for at in range(4, 48))
        others = [(names, replace(entry, signature=other)) for other in (*flipped, signature[:-1], signature + b"o")]
    elif changed == "numbers":
        others = [(names, replace(entry, **{name: 8})) for name in ("size", "tokens", "base")]
    else:
        value = getattr(entry, changed)
        others = [(names, replace(entry, **{changed: v})) for v in (b"", value[:-1], value + b"o", b"o" * len(value))]
    assert [signer.fault(*n, e) for n, e in others] == ["wrong signature"] * len(others)
