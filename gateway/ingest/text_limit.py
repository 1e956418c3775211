"""How much text a document may have, however small its file."""

from fusionkv.protos.runtime.errors import InvalidArgument


def check_text(size: int, most: int) -> None:
    """Raises InvalidArgument when text of `size` characters or bytes is too long."""
    if size > most:
        raise InvalidArgument(f"the document has more than {most} bytes of text: split it, or raise max_text_bytes")
