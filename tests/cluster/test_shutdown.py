"""A process that should end gets a call, and afterwards signals have their former handlers."""

from __future__ import annotations

import os
import signal

import pytest

from idletrain.cluster.shutdown import on_ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_call_and_given_back_afterwards(number: signal.Signals) -> None:
    calls: list[str] = []
    before = signal.getsignal(number)
    with on_ending(lambda: calls.append("end")):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert calls == ["end", "end"]
    assert signal.getsignal(number) == before


def test_an_error_inside_gives_them_back_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), on_ending(lambda: None):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before
