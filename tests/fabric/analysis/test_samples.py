"""What was measured survives its file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.errors import JobError
from idletrain.fabric.analysis.samples import CollectiveSample, Fabric, Point, StencilSample, TrainingSample, from_json

numbers = st.floats(1e-9, 1e9)
tuples = st.lists(numbers, max_size=4).map(tuple)
points = st.builds(Point, st.just("one way"), st.just("socket"), st.just(0), st.just(1), tuples)
collectives = st.builds(
    CollectiveSample, st.just("gloo"), st.just("all-reduce"), st.integers(2, 9), st.integers(1), tuples
)


@given(st.lists(points, max_size=3), st.lists(collectives, max_size=3))
def test_a_fabric_is_read_as_it_was_written(links: list[Point], operations: list[CollectiveSample]) -> None:
    nodes = [{"name": "a", "gpus": []}, {"name": "b", "gpus": ["H100"]}]
    training = [TrainingSample("gloo", "mlp", 2, 8, 100, (60, 40), (0.1,), (0.2,), (0.3,))]
    stencil = [StencilSample("gloo", "weak", True, 2, 1000, (0.1,), (0.2,), (0.3,))]
    fabric = Fabric({"preset": "quick"}, nodes, links, operations, training, stencil, ["a fault"], ["a gap"])
    assert from_json(fabric.as_json(), "a.json") == fabric


def test_a_node_is_known_by_its_name() -> None:
    assert Fabric({}, [{"name": "a"}, {"name": 7}]).name(1) == "7"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 2, "points": [{"what": 3}]}', "null"])
def test_what_is_no_such_file_is_refused(text: str) -> None:
    with pytest.raises(JobError, match=r"a\.json is not a file of idletrain fabric; measure again with --out"):
        from_json(text, "a.json")


@pytest.mark.parametrize(("schema", "which"), [(1, "an older"), (99, "a newer")])
def test_another_idletrain_s_file_is_refused(schema: int, which: str) -> None:
    with pytest.raises(JobError, match=f"written by {which} idletrain"):
        from_json(f'{{"schema": {schema}}}', "a.json")
