"""How many examples a test by hypothesis takes: a share of what it asks for, by the profile of the run."""

import hypothesis

# The same examples in every run, however slow it is; `make fuzz` is there to find new ones.
FEW, ALL = "few", "all"
_ALL_EXAMPLES = 100
hypothesis.settings.register_profile(FEW, derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile(ALL, derandomize=True, deadline=None, max_examples=_ALL_EXAMPLES)


def examples(count: int, few: int = 0) -> int:
    """`count` in `make test-all`; `few`, or else a quarter of it, in `make test`."""
    return count if every() else few or max(1, count // 4)


def every() -> bool:
    """Whether this run takes all examples."""
    return hypothesis.settings().max_examples == _ALL_EXAMPLES
