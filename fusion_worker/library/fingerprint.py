"""A model's fingerprint: a digest of its files."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path


def fingerprint(directory: Path) -> bytes:
    """SHA-256 over the names and bytes of configuration, weights and tokenizer files, in the order of their names."""
    hasher = hashlib.sha256()
    for file in sorted(_identity_files(directory)):
        hasher.update(json.dumps([file.name, file.stat().st_size]).encode())
        with file.open("rb") as stream:
            hasher.update(hashlib.file_digest(stream, "sha256").digest())
    return hasher.digest()


def _identity_files(directory: Path) -> Iterator[Path]:
    yield from directory.glob("*.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (directory / name).is_file():
            yield directory / name
