"""A trace is read in order of time, and one that cannot be is told."""

from __future__ import annotations

import pytest

from idletrain.errors import JobError
from idletrain.simulation.trace import check_trace, read_trace


def test_a_node_comes_before_it_goes_and_goes_before_it_comes_again() -> None:
    check_trace(read_trace("0,add,a\n5,remove,a\n9,add,a\n"))
    with pytest.raises(JobError, match="a comes twice without going at 5 ms; leave that line out"):
        check_trace(read_trace("0,add,a\n5,add,a\n"))
    with pytest.raises(JobError, match="b goes without having come at 7 ms"):
        check_trace(read_trace("0,add,a\n7,remove,b\n"))


def test_a_negative_time_is_no_time() -> None:
    with pytest.raises(JobError, match="--trace: line 1 is '-5,add,a'"):
        read_trace("-5,add,a\n")
