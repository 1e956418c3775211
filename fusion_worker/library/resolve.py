"""Resolves `--model` to a model directory: a directory, a GGUF file, a known model or a Hugging Face hub id."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from fusionkv.fusion_worker.library import cache, conversion
from fusionkv.fusion_worker.library.catalog import KNOWN
from fusionkv.fusion_worker.library.directory import shards
from fusionkv.protos.runtime.errors import FailedPrecondition, first_line

_GGUF = ".gguf"
# Files to download from a repository: no pickles, no weights of other frameworks, none twice.
_FILES: dict[str, Any] = {
    "allow_patterns": ["*.json", "*.safetensors", "*.jinja"],
    "ignore_patterns": ["consolidated*"],
}


def resolve(name: str | Path) -> Path:
    """The directory of a model.

    A GGUF file is converted at first use. A hub id is looked up in the Hugging Face cache, and downloaded if it is
    not there.

    Raises:
        FailedPrecondition: there is no such model, it has not been fetched, or it can't be converted.
        OSError: the folder of models can't be written.
    """
    path, text = Path(name), str(name)
    if path.is_dir():
        return path
    if path.suffix == _GGUF:
        return _converted(path)
    if text in KNOWN:
        if KNOWN[text].embeds:
            raise FailedPrecondition(f"{text} makes embeddings for retrieval, and can't be used as --model")
        directory = KNOWN[text].directory
        if not directory.is_dir():
            raise FailedPrecondition(f"{text} was not fetched yet: run `fusionkv model get {text}`")
        return directory
    if is_hub_id(text):
        return _from_hub(text)
    raise FailedPrecondition(
        f"{text} is no model: give the directory of a Hugging Face model, a *{_GGUF} file, a Hugging Face hub id "
        f"(ORG/NAME), or one of {', '.join(name for name, model in KNOWN.items() if not model.embeds)}"
    )


def is_hub_id(name: str) -> bool:
    """Whether a name can only be a Hugging Face hub id, ORG/NAME."""
    path = Path(name)
    return not (path.is_absolute() or path.is_dir() or path.suffix == _GGUF) and name.count("/") == 1


def _converted(file: Path) -> Path:
    from fusionkv.fusion_worker.library import gguf_file

    # Not resolved: in the Hugging Face cache, links bear the names of parts, and the files that they lead to do not.
    parts = gguf_file.parts_of(file)
    conversion.check_packages()
    return cache.make(
        cache.root() / "gguf" / conversion.key(gguf_file.digest(parts)) / gguf_file.name_of(file),
        lambda _, made: conversion.convert(parts, made),
    )


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        with suppress(LocalEntryNotFoundError):
            cached = Path(snapshot_download(repository, **_FILES, local_files_only=True))
            if _complete(cached):
                return cached
        snapshot = Path(snapshot_download(repository, **_FILES))
    except HFValidationError as error:
        raise FailedPrecondition(
            f"{repository} is neither a directory nor a Hugging Face hub id: {first_line(error)}"
        ) from error
    except Exception as error:  # huggingface_hub passes on errors of the network, the hub and the disk
        raise FailedPrecondition(
            f"{repository} is neither a directory nor in the Hugging Face cache, and can't be downloaded: "
            f"{first_line(error)}; check its name and the network, or give a directory"
        ) from error
    if not _complete(snapshot):  # without a network, huggingface_hub returns an incomplete snapshot
        raise FailedPrecondition(
            f"{snapshot} lacks config.json, tokenizer.json or some safetensors weights: {repository} has none, or "
            "could not be downloaded completely"
        )
    return snapshot


def _complete(directory: Path) -> bool:
    """Whether a snapshot has all files of a model: other programs may have downloaded only some of them."""
    if not all((directory / name).is_file() for name in ("config.json", "tokenizer.json")):
        return False
    try:
        return all(file.is_file() for file in shards(directory))
    except FailedPrecondition:
        return False
