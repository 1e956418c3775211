"""Draws the concepts, the path of a request and the kernels in docs/img, in the reader's light or dark scheme."""

from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent.parent / "docs/img"
WIDTH, SIZE = 640, 20
# Width of a letter in ems; system fonts are slightly narrower.
_LETTER = 0.53
# Fill and border of each kind of box, light and dark.
KINDS = {
    "plain": ("#f1f5f9", "#64748b", "#1e293b", "#94a3b8"),
    "reused": ("#ccfbf1", "#0f766e", "#134e4a", "#2dd4bf"),
    "lossless": ("#dbeafe", "#1d4ed8", "#1e3a8a", "#60a5fa"),
    "computed": ("#ffedd5", "#c2410c", "#7c2d12", "#fb923c"),
    "stale": ("#f5f3ff", "#7c3aed", "#4c1d95", "#a78bfa"),
}


class Drawing:
    """A drawing of boxes, arrows and text, 640 wide. Text must fit its box or the page."""

    def __init__(self, title: str, height: int) -> None:
        self._height = height
        self._parts = [f"<title>{escape(title)}</title>"]

    def box(self, x: int, y: int, width: int, label: str, kind: str = "plain", height: int = 40) -> None:
        """Adds a box. Raises ValueError when the label does not fit."""
        if len(label) * SIZE * _LETTER > width - 8 or x + width > WIDTH:
            raise ValueError(f"{label!r} is too long for a box of {width} at {x}")
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        if label:
            middle = y + height // 2 + 7
            self._parts.append(f'<text x="{x + width // 2}" y="{middle}" text-anchor="middle">{escape(label)}</text>')

    def text(self, x: int, y: int, words: str, weak: bool = False, anchor: str = "start") -> None:
        """Adds text. Raises ValueError when it does not fit the page."""
        length = len(words) * (SIZE - 3 * weak) * _LETTER
        left = x - {"start": 0, "middle": length / 2, "end": length}[anchor]
        if left < 0 or left + length > WIDTH:
            raise ValueError(f"{words!r} is too long for the page at {x}")
        of = ' class="weak"' if weak else ""
        self._parts.append(f'<text{of} x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>')

    def arrow(
        self, *points: tuple[int, int], label: tuple[int, int, str] | None = None, anchor: str = "middle"
    ) -> None:
        """Adds an arrow. label: position and text of its label."""
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="arrow" d="{path}"/>')
        if label is not None:
            self.text(*label, weak=True, anchor=anchor)

    def row(self, y: int, cells: "list[tuple[int, str, str]]", x: int = 20) -> None:
        """Adds boxes side by side. cells: their widths, labels and kinds."""
        for width, label, kind in cells:
            self.box(x, y, width, label, kind)
            x += width + 6

    def save(self, name: str) -> None:
        light = "".join(f".{k}{{fill:{v[0]};stroke:{v[1]}}}" for k, v in KINDS.items())
        dark = "".join(f".{k}{{fill:{v[2]};stroke:{v[3]}}}" for k, v in KINDS.items())
        style = (
            f".page{{fill:#fff}}text{{fill:#0f172a}}.weak{{fill:#475569;font-size:{SIZE - 3}px}}"
            f".arrow{{fill:none;stroke:#475569;stroke-width:2;marker-end:url(#to)}}.head{{fill:#475569}}{light}"
            "@media(prefers-color-scheme:dark){.page{fill:#0f172a}text{fill:#f1f5f9}.weak{fill:#cbd5e1}"
            f".arrow{{stroke:#cbd5e1}}.head{{fill:#cbd5e1}}{dark}}}"
        )
        head = (
            '<defs><marker id="to" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
            'orient="auto-start-reverse"><path class="head" d="M0 0 10 5 0 10z"/></marker></defs>'
        )
        page = f'<rect class="page" width="{WIDTH}" height="{self._height}" rx="8"/>'
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
            f'font-family="system-ui, sans-serif" font-size="{SIZE}" stroke-width="1.5">'
        )
        body = "\n".join([f"<style>{style}</style>", self._parts[0], head, page, *self._parts[1:]])
        text = body.replace("<text", '<text stroke="none"')
        (IMAGES / f"{name}.svg").write_text(f"{svg}\n{text}\n</svg>\n", encoding="utf-8")


def chunk() -> None:
    d = Drawing("Two prompts over the same chunks in another order", 256)
    d.text(20, 34, "Question 1")
    d.row(48, [(90, "system", "plain"), (90, "A", "computed"), (90, "B", "computed"), (90, "C", "computed")])
    d.box(404, 48, 130, "question 1", "plain")
    d.text(20, 122, "Question 2, a minute later")
    d.row(136, [(90, "system", "lossless"), (90, "C", "reused"), (90, "A", "reused"), (90, "D", "computed")])
    d.box(404, 136, 130, "question 2", "plain")
    d.text(20, 212, "A prefix cache reuses the system prompt. FusionKV also reuses", weak=True)
    d.text(20, 238, "A and C, rotates their keys to the new positions, and computes D.", weak=True)
    d.save("concept-chunk")


def path() -> None:
    d = Drawing("An entry's path, an exact hit and an alternative hit", 276)
    d.text(20, 34, "Stored entries of chunk B")
    d.row(48, [(90, "system", "plain"), (60, "A", "plain"), (60, "B", "lossless")])
    d.text(270, 75, "path: system, A", weak=True)
    d.row(100, [(90, "system", "plain"), (60, "B", "reused")])
    d.text(270, 127, "path: system (encoded alone)", weak=True)
    d.text(20, 178, "Prompts")
    d.row(192, [(90, "system", "plain"), (60, "A", "plain"), (60, "B", "lossless")])
    d.text(20, 258, "exact hit", weak=True)
    d.row(192, [(90, "system", "plain"), (60, "C", "plain"), (60, "B", "reused")], x=330)
    d.text(330, 258, "alternative hit", weak=True)
    d.save("concept-path")


def stale() -> None:
    d = Drawing("A chunk that was encoded alone has not seen the text before it", 258)
    d.text(20, 34, "Full attention: every token has seen all text before it")
    d.row(48, [(210, "Ann lives in Oslo.", "lossless"), (190, "She is a doctor.", "lossless")])
    d.arrow((330, 90), (330, 112), (60, 112), (60, 92))
    d.text(20, 160, "Reused: the second chunk was encoded alone")
    d.row(174, [(210, "Ann lives in Oslo.", "lossless"), (190, "She is a doctor.", "stale")])
    d.text(20, 240, 'The KV of "She" does not depend on "Ann": it is stale.', weak=True)
    d.save("concept-stale")


def recipe() -> None:
    d = Drawing("A recipe chooses tokens; the ratio says how many", 256)
    d.text(20, 34, "Reused tokens, and tokens to recompute (orange)")
    chosen = {3, 4, 11, 17}
    for n in range(20):
        d.box(20 + 30 * n, 50, 26, "", "computed" if n in chosen else "reused")
    for n in (3, 11, 17):
        d.arrow((33 + 30 * n, 132), (33 + 30 * n, 96))
    d.box(110, 134, 440, "attention of the question's tokens", "plain")
    d.text(20, 212, "The recipe chooses the tokens. The ratio is 4 of 20 = 0.2.", weak=True)
    d.text(20, 238, "A ratio of 1 equals full attention; a ratio of 0 is full reuse.", weak=True)
    d.save("concept-recipe")


def lease() -> None:
    d = Drawing("A lease keeps entries in place while they are fetched", 232)
    d.box(20, 30, 130, "worker")
    d.box(490, 30, 130, "cache")
    d.arrow((150, 42), (488, 42), label=(320, 34, "look up 8 chunks"))
    d.arrow((490, 62), (152, 62), label=(320, 84, "hits, under a lease of 30 s"))
    d.arrow((556, 74), (556, 106))
    d.box(390, 108, 230, "leased: not evicted", "reused")
    d.arrow((390, 128), (152, 128), label=(270, 120, "KV bytes"))
    d.box(20, 108, 130, "pool", "reused")
    d.text(20, 190, "When a worker dies, its leases expire, and the entries", weak=True)
    d.text(20, 214, "can be evicted again.", weak=True)
    d.save("concept-lease")


def tiers() -> None:
    d = Drawing("The tiers of KV: worker's pool, memory, disk, remote tier", 254)
    d.box(20, 24, 600, "worker: pool of KV pages", "computed")
    d.arrow((320, 90), (320, 66))
    d.box(20, 92, 290, "cache service: memory", "reused")
    d.box(330, 92, 290, "cache service: disk", "reused")
    d.arrow((320, 158), (320, 134))
    d.box(20, 160, 600, "remote tier: Redis or Mooncake Store", "lossless")
    d.text(20, 236, "An entry that is evicted from a tier stays in the tiers below.", weak=True)
    d.save("concept-tiers")


def request() -> None:
    """Numbers as in "The life of a request" of docs/structure.md."""
    d = Drawing("The path of a request: application, gateway, fusion worker, cache service", 442)
    d.box(20, 20, 126, "application", height=64)
    d.box(246, 20, 170, "", "lossless", height=64)
    d.text(331, 46, "gateway", anchor="middle")
    d.text(331, 70, "2 retrieve, 3 plan", weak=True, anchor="middle")
    d.box(496, 20, 124, "corpora", height=64)
    d.arrow((146, 44), (244, 44), label=(195, 36, "1 question"))
    d.arrow((246, 62), (148, 62), label=(195, 82, "10 answer"))
    d.arrow((416, 44), (494, 44), label=(455, 36, "search"))
    d.arrow((496, 62), (418, 62), label=(455, 82, "chunks"))
    d.arrow((290, 160), (290, 86), label=(278, 128, "tokens"), anchor="end")
    d.arrow((372, 84), (372, 158), label=(384, 128, "4 token ids by chunk"), anchor="start")
    d.box(20, 160, 600, "", "computed", height=128)
    d.text(36, 190, "fusion worker")
    d.text(330, 190, "pool of KV pages", weak=True)
    d.text(36, 220, "5 look up all chunks", weak=True)
    d.text(330, 220, "6 load hits, encode misses", weak=True)
    d.text(36, 246, "7 select tokens", weak=True)
    d.text(330, 246, "8 recompute them", weak=True)
    d.text(36, 272, "9 decode", weak=True)
    d.arrow((90, 288), (90, 350), label=(102, 324, "Lookup"), anchor="start")
    d.arrow((250, 352), (250, 290), label=(262, 324, "Fetch: KV bytes"), anchor="start")
    d.arrow((470, 288), (470, 350), label=(482, 324, "Put: KV bytes"), anchor="start")
    d.box(20, 352, 600, "cache service: index, leases, memory, disk", "reused")
    d.text(20, 424, "KV bytes never pass through the gateway.", weak=True)
    d.save("request")


def kernels() -> None:
    d = Drawing("A tile of query rows walks the segments of its request", 444)

    def marks(*places: tuple[int, int]) -> None:
        for x, y in places:
            d.box(x, y, 10, "", "computed", height=14)

    d.text(20, 34, "Pool: where keys and values are stored")
    d.row(48, [(46, "S", "plain"), *((120, f"chunk {name}", "reused") for name in "BCA")])
    d.box(450, 48, 150, "fresh rows", "computed")
    marks((90, 92), (130, 92), (170, 92), (230, 92), (350, 92), (400, 92))
    d.text(20, 146, "Prompt: the segments in order of position")
    d.row(160, [(46, "S", "plain"), (150, "A, shift -460", "reused"), (150, "B, shift +160", "reused")])
    d.box(384, 160, 216, "C: later, skipped", "plain")
    marks((90, 204), (150, 204), (246, 204), (300, 204), (350, 204))
    d.text(20, 258, "Tile of query rows: rotated once for each segment")
    d.row(272, [(188, f"rotated by {shift}", "lossless") for shift in ("0", "-460", "+160")])
    d.text(20, 344, "Keys are read as they were stored. One comparison of positions", weak=True)
    d.text(20, 368, "leaves out hidden slots and later tokens.", weak=True)
    d.text(20, 402, "Orange: recomputed tokens. Their old slots are hidden; their new", weak=True)
    d.text(20, 426, "keys (fresh rows) are a segment with positions of its own.", weak=True)
    d.save("kernels")


def main() -> None:
    for draw in (chunk, path, stale, recipe, lease, tiers, request, kernels):
        draw()


if __name__ == "__main__":
    main()
