"""The reference that all other tests compare with is what a real, undisturbed run gives."""

from __future__ import annotations

from collections.abc import Callable

from .helpers import Run


def test_a_run_gives_what_one_process_gives(
    make_run: Callable[..., Run], undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=4)
    head = run.launch()
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    assert not run.events("lost", "refused", "paused")
    assert not head.survivors()
