"""Protobuf messages of any content, from their descriptors: mostly of the right form, sometimes far from it."""

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

F = FieldDescriptor
DIGESTS = [bytes([n]) * 32 for n in range(4)]
TEXTS = [
    *("c", "a.txt", "d.html", "text/plain", "application/pdf", "text/html", "a question?", "full_reuse", "prophetkv"),
    *("fusionrag", "a3+window", "full_reuse+window(8,5)", "prefix_cache", "../x", "x" * 300, "\0", "é\u2028"),
]  # fmt: skip
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(TEXTS), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
_WHOLE = {
    F.TYPE_UINT32: (0, 2**32 - 1),
    F.TYPE_UINT64: (0, 2**64 - 1),
    F.TYPE_INT32: (-(2**31), 2**31 - 1),
    F.TYPE_INT64: (-(2**63), 2**63 - 1),
}


def _whole(low: int, high: int) -> st.SearchStrategy[int]:
    # Small ones for the most part: a request for 4,000 tokens tells no more than one for 4, and takes long.
    return st.one_of(
        st.integers(max(low, 0), 8), st.integers(max(low, 0), 600), st.sampled_from([low, high, high // 2])
    )


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in _WHOLE:
        return _whole(*_WHOLE[field.type])
    if field.type == F.TYPE_BOOL:
        return st.booleans()
    if field.type in (F.TYPE_DOUBLE, F.TYPE_FLOAT):
        return st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(width=32))
    if field.type == F.TYPE_STRING:
        return st.one_of(st.sampled_from(TEXTS), st.text(max_size=40).filter(_encodable))
    if field.type == F.TYPE_BYTES:
        return st.one_of(st.sampled_from(DIGESTS), st.sampled_from([b"", bytes(16)]), st.binary(max_size=64))
    assert field.type == F.TYPE_ENUM, field.full_name
    return st.integers(0, len(field.enum_type.values) + 1)


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@st.composite
def messages(draw: st.DrawFn, of: Descriptor, depth: int = 4) -> Any:
    """A message of that type; each field is there or not."""
    made = message_factory.GetMessageClass(of)()
    for field in of.fields:
        if draw(st.integers(0, 3)) == 0:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (_scalar(field.message_type.fields_by_name[name]) for name in ("key", "value"))
            getattr(made, field.name).update(draw(st.dictionaries(key, value, max_size=4)))
            continue
        if field.message_type is None:
            inside = _scalar(field)
        elif depth:
            inside = messages(field.message_type, depth - 1)
        else:
            continue
        if field.is_repeated:
            getattr(made, field.name).extend(draw(st.lists(inside, max_size=4)))
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(draw(inside))
        else:
            setattr(made, field.name, draw(inside))
    return made
