"""What of HTML its readers do not see: by elements, attributes and the page's style sheets."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

import tinycss2
from bs4 import BeautifulSoup, Tag
from bs4.element import PageElement, PreformattedString
from tinycss2.ast import Declaration, Node, QualifiedRule

# Elements that are not shown, whatever their style, or that lead to other pages.
_INVISIBLE = (
    *("head", "title", "script", "style", "noscript", "template", "svg", "nav"),
    *("iframe", "noframes", "noembed", "datalist"),
)
# Style sheets of more characters together are not read: their tokens may take 100 MB. Nor are they if the rules that
# show or hide have more compounds of one name, class or attribute: each is compared with every element that has it.
_MAX_CHARACTERS, _MAX_COMPOUNDS = 1 << 19, 200
_HIDING = {"display": ("none",), "visibility": ("hidden", "collapse")}
# Names of pseudo-elements that may follow one colon.
_PSEUDO_ELEMENTS = ("before", "after", "first-line", "first-letter")

_Specificity = tuple[int, int, int]  # ids, classes, names
_NONE: _Specificity = (0, 0, 0)
# What wins in the cascade: importance, then the style attribute, specificity and order.
_Weight = tuple[bool, bool, _Specificity, int]
# For each property, the weight of the declaration that won, and whether it hides.
_Style = dict[str, tuple[_Weight, bool]]


def is_hidden(name: str, attributes: Mapping[str, object]) -> bool:
    """Whether an element is navigation, or not shown, by itself: without style sheets."""
    return _is_left_out(name, attributes) or any(hides for _, hides in _own_style(name, attributes).values())


def hidden(soup: BeautifulSoup) -> dict[int, PageElement]:
    """The elements and texts of a page that are not shown, by their id(), without those in hidden elements.

    What readers may reveal is not hidden: rules with a pseudo-class (`:checked`), a sibling or a condition (`@media`)
    may show, but do not hide. If style sheets hide all text, scripts show the page, and no sheet counts.

    Raises:
        RecursionError: elements are nested too deeply.
    """
    page = _Page(_Sheets(soup).steps)
    page.visit(soup, set(), visible=True)
    if not page.has_text:
        page = _Page({})
        page.visit(soup, set(), visible=True)
    return page.hidden


def _is_left_out(name: str, attributes: Mapping[str, object]) -> bool:
    if name == "template" and "shadowrootmode" in attributes:
        return False
    return name in _INVISIBLE or "navigation" in str(attributes.get("role", "")).lower().split()


def _own_style(name: str, attributes: Mapping[str, object]) -> _Style:
    """An element's style by the rules of browsers, which any other overrides, and by its attribute."""
    style: _Style = {}
    is_closed = (name == "dialog" and "open" not in attributes) or "popover" in attributes
    if is_closed or ("hidden" in attributes and attributes["hidden"] != "until-found"):
        style["display"] = (False, False, _NONE, -1), True
    written = str(attributes.get("style", ""))
    if any(name in written.lower() for name in _HIDING):
        for order, declaration in enumerate(_declarations(_contents(written))):
            weight = (declaration.important, True, _NONE, order)
            _declare(style, declaration.lower_name, weight, _hides(declaration))
    return style


def _declare(style: _Style, name: str, weight: _Weight, hides: bool) -> None:
    if name not in style or style[name][0] < weight:
        style[name] = weight, hides


def _hides(declaration: Declaration) -> bool:
    value = _significant(declaration.value)
    return len(value) == 1 and value[0].type == "ident" and value[0].lower_value in _HIDING[declaration.lower_name]


def _contents(css: str | Sequence[Node]) -> list[Node]:
    """Declarations and rules in a block, or in a style attribute."""
    try:
        return list(tinycss2.parse_blocks_contents(css))
    except ValueError:  # a number of more digits than Python converts
        return []


def _declarations(nodes: Iterable[Node]) -> list[Declaration]:
    return [node for node in nodes if node.type == "declaration" and node.lower_name in _HIDING]


def _significant(tokens: Iterable[Node]) -> list[Node]:
    return [token for token in tokens if token.type not in ("whitespace", "comment")]


def _parts(tokens: Iterable[Node]) -> Iterator[list[Node]]:
    """What commas separate."""
    for is_comma, part in groupby(tokens, lambda token: bool(token == ",")):
        if not is_comma:
            yield list(part)


def _on_screen(media: Sequence[Node]) -> bool | None:
    """Whether a list of media queries is true of every screen; None if of some."""
    matches: set[bool | None] = set()
    for query in _parts(media):
        words = [token.lower_value if token.type == "ident" else "" for token in _significant(query)]
        words = words[words[:1] == ["only"] :]
        if words in ([], ["all"], ["screen"]):
            matches.add(True)
        elif words[0] in ("", "all", "not", "screen"):
            matches.add(None)
    return True in matches or not media or (None if matches else False)


@dataclass(eq=False)
class _Step:
    """A compound of a selector, such as `p.note[lang=en]`; the last one has what the selector's rule declares."""

    features: frozenset[str]
    before: "_Step | None"
    is_child: bool  # of what matches the step before; otherwise any descendant
    declared: list[tuple[str, _Weight, bool]] = field(default_factory=list)


class _Selector:
    """A selector, as far as it is judged.

    Attributes:
        compounds: features of an element (`p`, `*`, `#id`, `.class`, `[name`, `[name=value`), and whether it is a
            child of what the compound before matches.
        is_certain: whether it matches no other elements.
        specificity: as in CSS, if every pseudo-class counts as a class.
    """

    def __init__(self) -> None:
        self.compounds: list[tuple[list[str], bool]] = [([], False)]
        self.is_certain = True
        self.specificity = _NONE
        self._combinator = ""

    def combine(self, combinator: str) -> None:
        if combinator != " " or not self._combinator:
            self._combinator = combinator

    def add(self, feature: str, counts: _Specificity = _NONE, is_certain: bool = True) -> None:
        """Adds to the last compound, or begins the next one."""
        if self._combinator and self.compounds[-1][0]:
            if self._combinator in "+~":
                self.compounds.clear()
                is_certain = False
            self.compounds.append(([], self._combinator == ">"))
        self._combinator = ""
        self.compounds[-1][0].append(feature)
        self.is_certain &= is_certain
        self.specificity = _sum(self.specificity, counts)


def _sum(one: _Specificity, other: _Specificity) -> _Specificity:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _selector(tokens: Iterable[Node]) -> _Selector | None:
    """None for a pseudo-element, or if it can't be read."""
    selector = _Selector()
    rest = iter(tokens)
    for token in rest:
        if token.type in ("whitespace", "comment"):
            selector.combine(" ")
        elif token.type == "ident":
            selector.add(token.lower_value, counts=(0, 0, 1))
        elif token.type == "hash":
            selector.add("#" + token.value, counts=(1, 0, 0))
        elif token.type == "[] block":
            feature, is_certain = _attribute(_significant(token.content))
            selector.add(feature, counts=(0, 1, 0), is_certain=is_certain)
        elif token in (">", "+", "~"):
            selector.combine(token.value)
        elif token in ("*", "&"):
            selector.add("*", is_certain=token == "*")
        elif token == "." and (name := next(rest, None)) and name.type == "ident":
            selector.add("." + name.value, counts=(0, 1, 0))
        elif token == ":" and (name := next(rest, None)) and _is_pseudo_class(name):
            selector.add("*", counts=(0, 1, 0), is_certain=False)
        else:
            return None
    return selector if selector.compounds[-1][0] and selector._combinator in ("", " ") else None


def _is_pseudo_class(name: Node) -> bool:
    return name.type == "function" or (name.type == "ident" and name.lower_value not in _PSEUDO_ELEMENTS)


def _attribute(tokens: Sequence[Node]) -> tuple[str, bool]:
    """The feature of an element with an attribute, and whether it is all that the brackets ask for."""
    if not tokens or tokens[0].type != "ident":
        return "*", False
    name = "[" + tokens[0].lower_value
    if len(tokens) == 3 and tokens[1] == "=" and tokens[2].type in ("ident", "string"):
        return f"{name}={tokens[2].value}", True
    return name, len(tokens) == 1


class _Sheets:
    """The rules of a page's style sheets that show or hide.

    Attributes:
        steps: the steps of their selectors, by a feature of the elements that match; none if there are too many.
    """

    def __init__(self, soup: BeautifulSoup) -> None:
        self.steps: defaultdict[str, list[_Step]] = defaultdict(list)
        self._order = 0
        sheets = [
            (str(sheet.get("media") or ""), sheet.get_text())
            for sheet in soup("style")
            if str(sheet.get("type") or "text/css").strip().lower() == "text/css"
            and not sheet.find_parent(["noscript", "template"])
        ]
        # Most sheets hide nothing; to read one takes a second for 300,000 characters.
        hide = any(value in css.lower() for _, css in sheets for values in _HIDING.values() for value in values)
        if hide and sum(len(css) for _, css in sheets) <= _MAX_CHARACTERS:
            for media, css in sheets:
                with suppress(ValueError, RecursionError):  # as in _contents; or rules are nested too deeply
                    on_screen = _on_screen(tinycss2.parse_component_value_list(media))
                    if on_screen is not False:
                        self._read(tinycss2.parse_stylesheet(css), on_screen is True, _NONE)
        if any(len(steps) > _MAX_COMPOUNDS for steps in self.steps.values()):
            self.steps.clear()

    def _read(self, nodes: Iterable[Node], is_certain: bool, outer: _Specificity) -> None:
        """Adds rules that apply, or may; `outer`: the specificity of the rule in which they are."""
        for node in nodes:
            if node.type == "qualified-rule":
                self._add(node, is_certain, outer)
            elif node.type == "at-rule" and node.content is not None:
                on_screen = _on_screen(node.prelude) if node.lower_at_keyword == "media" else None
                if on_screen is not False:
                    self._read(_contents(node.content), is_certain and on_screen is True, outer)

    def _add(self, rule: QualifiedRule, is_certain: bool, outer: _Specificity) -> None:
        nodes = _contents(rule.content)
        declared = {(node.lower_name, node.important): _hides(node) for node in _declarations(nodes)}
        self._order += 1
        most = outer
        for tokens in _parts(rule.prelude):
            if (selector := _selector(tokens)) is None:
                continue
            specificity = _sum(outer, selector.specificity)
            most = max(most, specificity)
            declarations = [
                (name, (important, False, specificity, self._order), hides)
                for (name, important), hides in declared.items()
                if not hides or (is_certain and selector.is_certain)
            ]
            if declarations:
                self._keep(selector, declarations)
        self._read(nodes, False, most)

    def _keep(self, selector: _Selector, declared: list[tuple[str, _Weight, bool]]) -> None:
        step: _Step | None = None
        for features, is_child in selector.compounds:
            step = _Step(frozenset(features), step, is_child)
            # By an id if there is one, else by a class, an attribute or a name.
            self.steps[min(features, key=lambda feature: "#.[".find(feature[0]) % 4)].append(step)
        assert step
        step.declared = declared


class _Page:
    """Finds what is hidden in a page, element by element.

    Attributes:
        hidden: what `hidden` returns.
        has_text: whether any text is shown.
    """

    def __init__(self, steps: Mapping[str, list[_Step]]) -> None:
        self.hidden: dict[int, PageElement] = {}
        self.has_text = False
        self._steps = steps
        self._above: Counter[_Step] = Counter()  # matched by ancestors

    def visit(self, element: Tag, parent: set[_Step], visible: bool) -> bool:
        """Adds what is hidden in an element; returns whether any of the element is shown.

        Args:
            parent: the steps that its parent matches.
            visible: whether its parent is, by the property `visibility`, which elements inherit.
        """
        style = _own_style(element.name, element.attrs)
        matched = self._cascade(element, parent, style)
        shown = False
        if not (_is_left_out(element.name, element.attrs) or ("display" in style and style["display"][1])):
            if "visibility" in style:
                visible = not style["visibility"][1]
            shown = visible
            self._above.update(matched)
            for child in element.contents:
                if isinstance(child, Tag):
                    shown |= self.visit(child, matched, visible)
                elif not visible:
                    self.hidden[id(child)] = child
                elif not isinstance(child, PreformattedString) and str(child).strip():
                    self.has_text = True
            self._above.subtract(matched)
        if not shown:
            self.hidden[id(element)] = element
        return shown

    def _cascade(self, element: Tag, parent: set[_Step], style: _Style) -> set[_Step]:
        """Adds what style sheets declare for an element; returns the steps that it matches."""
        matched: set[_Step] = set()
        features = _features(element) if self._steps else set()
        for feature in features:
            for step in self._steps.get(feature, ()):
                before = step.before
                if step.features <= features and (
                    not before or (before in parent if step.is_child else self._above[before])
                ):
                    matched.add(step)
                    for declared in step.declared:
                        _declare(style, *declared)
        return matched


def _features(element: Tag) -> set[str]:
    features = {"*", element.name}
    for name, value in element.attrs.items():
        text = " ".join(value) if isinstance(value, list) else str(value)
        features |= {f"[{name}", f"[{name}={text}"}
        if name == "id":
            features.add(f"#{text}")
        elif name == "class":
            features.update(f".{word}" for word in text.split())
    return features
