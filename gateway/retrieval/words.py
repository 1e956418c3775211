"""What of a question is searched for by words."""

# Words of a question that say nothing of what it is about. In a small corpus "of" is rare enough to weigh as much as
# a title, and a page with three of them came before the page that was asked for.
_SMALL = (
    "a an and are as at be but by do does for from had has have how in is it its of on or that the their there these "
    "this those to was were what when where which who whom whose why with"
)
_FUNCTION_WORDS = frozenset(_SMALL.split())


def content(question: str) -> str:
    """The question without its function words; all of it when it has no others."""
    words = [w for w in question.split() if w.strip(".,:;!?\"'()").lower() not in _FUNCTION_WORDS]
    return " ".join(words) or question
