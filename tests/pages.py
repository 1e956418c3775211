"""A page of HTML as a strict reader takes it."""

from html.parser import HTMLParser

_VOID = {"meta", "br", "wbr", "hr", "img", "input", "link", "circle", "path", "line", "polyline"}


class Page(HTMLParser):
    """Its elements with their attributes, and its text. open: elements that were not closed.

    Raises AssertionError where one is closed that is not open.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
