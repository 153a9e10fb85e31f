"""A fabric as one HTML file."""

from __future__ import annotations

from html.parser import HTMLParser

from idletrain.fabric.analysis import compare, page
from idletrain.fabric.analysis.samples import Fabric

from .test_tables import example


class Reader(HTMLParser):
    """A page's tags, what they refer to, and text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_has_verdict_curves_heat_maps_and_tables_and_needs_nothing_else() -> None:
    read = Reader(page.fabric_page(example()))
    assert read.links == []
    assert "script" not in read.tags
    assert compare.sentence(example()) in read.text
    assert read.tags.count("figure") == 3
    assert read.text.count("Pairs: ") == 2
    assert "n2 to n0: 32 Mbit/s" in read.text
    assert "NCCL: no GPU" in read.text


def test_in_a_heat_map_every_pair_is_a_square_and_the_fastest_is_full() -> None:
    what, heat = page.heat_of(example(), "one way")
    assert what == "one way"
    assert len(heat.boxes) == 6
    assert max(share for _, share in heat.boxes) == 1
    assert min(share for _, share in heat.boxes) == 0.333


def test_a_page_of_one_node_has_no_curves() -> None:
    read = Reader(page.fabric_page(Fabric({}, [{"name": "alone"}])))
    assert "figure" not in read.tags
    assert "No verdict: there is no second node" in read.text


def test_a_page_of_two_fabrics() -> None:
    read = Reader(page.comparison_page(["a", "b"], compare.compare(example(), example())))
    assert "a against b" in read.text
    assert "no significant effect" in read.text
