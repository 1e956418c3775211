"""Which elements of HTML their readers do not see, by name and attributes; style sheets are not read."""

import re
from collections.abc import Mapping

# Elements that are not shown, or that lead to other pages.
_UNSEEN = {
    *("head", "title", "script", "style", "noscript", "template", "svg", "nav"),
    *("iframe", "noframes", "noembed", "datalist"),
}
# A style attribute; other properties may end with these names.
_HIDING = re.compile(
    r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse))\s*(?:[;!]|$)", re.IGNORECASE
)


def is_hidden(name: str, attributes: Mapping[str, object]) -> bool:
    """Whether an element is navigation, or not shown."""
    return (
        (name in _UNSEEN and "shadowrootmode" not in attributes)
        or (name == "dialog" and "open" not in attributes)
        or "popover" in attributes
        or attributes.get("hidden", "until-found") != "until-found"
        or "navigation" in str(attributes.get("role", "")).lower().split()
        or bool(_HIDING.search(str(attributes.get("style", ""))))
    )
