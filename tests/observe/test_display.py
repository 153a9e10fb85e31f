"""What a person, or a program, sees of a run."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import time
from typing import Any

import pytest
from rich.console import Console
from test_summary import CHURN, RECORD_KEYS, committed, event, joined, leased, lost, staged, started, summary_of

from idletrain import held_interrupts
from idletrain.observe.display import (
    USELESS,
    JsonDisplay,
    LineDisplay,
    ScreenDisplay,
    choose_display,
    describe_event,
    final_lines,
    folding,
    score_text,
)
from idletrain.observe.summary import Summary

WIDTH = 100


def tell(shown: LineDisplay | JsonDisplay | ScreenDisplay, events: list[dict[str, Any]]) -> None:
    take = folding(shown.summary, shown)
    for one in events:
        take(one)


def lines_of(events: list[dict[str, Any]]) -> list[str]:
    out = io.StringIO()
    with LineDisplay(out, Summary()) as shown:
        tell(shown, events)
    return out.getvalue().splitlines()


def test_lines_say_that_a_run_starts_if_nothing_happens_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(held_interrupts, "SILENT_SECONDS", 0.02)
    with LineDisplay(io.StringIO(), Summary()) as shown:
        tell(shown, CHURN)
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
    with LineDisplay(io.StringIO(), Summary()) as shown:
        time.sleep(0.1)
        tell(shown, CHURN)
    assert capsys.readouterr().err == "idletrain: starting the run ...\n"
    own = [t for t in threading.enumerate() if isinstance(t, threading.Timer) and t.interval == 0.02]
    for timer in own:
        timer.join(1)
    assert not any(timer.is_alive() for timer in own)


def test_lines_tell_the_start_workers_and_scores_with_their_seconds() -> None:
    assert lines_of(CHURN) == [
        "    0.0s  run demo: 3 rounds of 2 subnets; watch it at http://127.0.0.1:1/status",
        "    0.0s  a joined (cpu, 1.0 GiB)",
        "    0.0s  b joined (cpu, 1.0 GiB)",
        "    4.0s  a left after a notice",
        "    6.0s  b was killed",
        "    6.0s  c joined (cpu, 1.0 GiB)",
        "    8.5s  round 1: accuracy 0.8000, loss 0.5000",
        "   10.0s  completed: 1 rounds are done",
    ]


def test_what_there_is_to_say_of_the_dashboard_stands_behind_its_address() -> None:
    line = describe_event({**CHURN[0], "dashboard_note": "port 8787 is in use"})
    assert line is not None
    assert line.endswith("; watch it at http://127.0.0.1:1/status (port 8787 is in use)")


def test_json_is_an_object_a_round_and_the_summary_as_the_last() -> None:
    out = io.StringIO()
    with JsonDisplay(out, Summary()) as shown:
        tell(shown, CHURN)
    first, last = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["round_seconds"], first["rounds"], first["local_steps"]) == (2.0, 1, 100)
    assert first["preemptions"] == {"notice": 1, "kill": 1}
    assert last.keys() == RECORD_KEYS
    assert last["params_sha256"] == "ab"
    assert last["status"] == "completed"


def screen_of(events: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=WIDTH, color_system=None)
    with ScreenDisplay(console, Summary()) as shown:
        tell(shown, events)
    return out.getvalue()


def test_the_screen_shows_progress_accuracy_workers_and_news() -> None:
    shown = screen_of([*CHURN[:-2], event("worker_notice", 9.0, worker="tcp://c")])
    last = shown[shown.rindex("idletrain demo") :]
    for text in ("round 1/3", "accuracy 0.8000, loss 0.5000", "1 worker ", "goodput", "steps/s", "ETA 4 s"):
        assert text in last
    assert "c " in last
    assert "draining" in last
    assert "b was killed" in last


def test_a_terminal_s_echo_of_ctrl_c_has_room_beside_the_frame() -> None:
    """In the next line, it would leave the frame's first line behind when the next frame is drawn."""
    last_lines = re.findall("╰─*╯", screen_of(CHURN))
    assert last_lines
    assert {len(line) + len("^C") for line in last_lines} == {WIDTH}


def test_the_link_is_one_line_above_the_frame_however_long_it_is() -> None:
    link = f"http://127.0.0.1:8787/idletrain?token={'0' * 200}"
    shown = screen_of([{**started(), "dashboard": link}, *CHURN[1:4]])
    assert [line for line in shown.splitlines() if line.endswith(link)]
    assert shown.count("token=") == 1


def test_the_screen_shows_why_a_run_waits() -> None:
    assert "for workers: 0 of 4 are there" in screen_of(
        [started(), event("waiting", 1.0, reason="for workers: 0 of 4 are there")]
    )


def test_a_screen_without_any_event_is_drawn() -> None:
    assert "starting" in screen_of([])


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (started(resumed_at=7), "run demo: 3 rounds of 2 subnets, from round 7; watch it at http://127.0.0.1:1/status"),
        (
            started() | {"method": "local-sgd"},
            "run demo: 3 rounds of 2 whole networks; watch it at http://127.0.0.1:1/status",
        ),
        (
            started(resumed_at=2) | {"phases": 2},
            "run demo: 3 rounds in 2 phases, from round 2; watch it at http://127.0.0.1:1/status",
        ),
        (event("worker_left", 1.0, worker="w", name="w", cause="end"), None),
        (lost(1.0, 3, "lease", 0, 0, 0.0), "subnet 3 of round 0: tcp://a is silent, leased again"),
        (lost(1.0, 3, "kill", 0, 0, 0.0), None),
        (
            event("refused", 1.0, round=2, subnet=1, reply="corrupt"),
            "subnet 1 of round 2: an update is refused: it was damaged on its way",
        ),
        (event("worker_refused", 1.0, worker="w", reason="version"), "worker refused: version"),
        (event("paused", 1.0, reason="no room"), "paused: no room"),
        (event("snapshot", 1.0, round=1, seconds=0.1), None),
    ],
)
def test_an_event_is_a_line_or_no_news(one: dict[str, Any], line: str | None) -> None:
    assert describe_event(one) == line


def test_the_last_lines_of_a_calm_run_do_not_count_troubles() -> None:
    text = "\n".join(final_lines(summary_of([started(), committed(2.0, 0)]), "done"))
    for part in ("preemptions", "leased again", "lost", "slow"):
        assert part not in text


def test_the_last_lines_hold_every_number_of_the_record() -> None:
    text = "\n".join(final_lines(summary_of(CHURN), "done: all rounds"))
    for part in ("done: all rounds", "accuracy 0.8000", "after 1 rounds", "100 local steps in 10 s", "1 with notice"):
        assert part in text
    for part in (
        "1 without",
        "2 subnets were leased again to other workers",
        "goodput 64.3%",
        "30 steps",
        "5 lost",
        "sha256 ab",
        "runs/demo",
    ):
        assert part in text


def test_scores_are_reported_as_far_as_there_are_any() -> None:
    assert score_text(0.5, 1.25) == "accuracy 0.5000, loss 1.2500"
    assert score_text(None, 1.25) == "loss 1.2500"
    assert (
        score_text(0.5, 1.25, 0.03, 1.1)
        == "accuracy 0.5000, loss 1.2500, calibration error 0.0300, best temperature 1.10"
    )
    assert score_text(None, None) == "not evaluated"


def test_the_display_fits_where_output_goes() -> None:
    assert isinstance(choose_display(True, Console(file=sys.stdout), Summary()), JsonDisplay)
    assert isinstance(choose_display(False, Console(file=io.StringIO()), Summary()), LineDisplay)
    assert isinstance(choose_display(False, Console(file=io.StringIO(), force_terminal=True), Summary()), ScreenDisplay)


def test_a_network_that_is_no_better_than_a_constant_prediction_is_told_so() -> None:
    summary = summary_of(CHURN)
    told = f"  warning: {USELESS}"
    assert "loss 0.5000 (a constant prediction's: 2.3000)" in "\n".join(final_lines(summary, "done"))
    assert told not in final_lines(summary, "done")
    summary.constant_loss = 0.5
    assert told in final_lines(summary, "done")


def test_the_screen_names_the_slow_worker_and_what_the_round_waits_for() -> None:
    events = [started(), *(joined(0.0, name) for name in "ab")]
    for number, (name, seconds) in enumerate((("a", 1.0), ("b", 9.0))):
        lease = {"round": 0, "subnet": number, "attempt": number, "worker": f"tcp://{name}"}
        events += [event("leased", 1.0, **lease, step=0)]
        events += [event("attempt_ended", 5.0, **lease, ended="done", steps=50, train_seconds=seconds)]
    events += [{**leased(6.0, 0, "a"), "attempt": 5}, {**leased(6.0, 1, "b"), "attempt": 6}, staged(7.0, 0, 1.0)]
    screen = screen_of(events)
    assert re.search(r"a .*50 steps/s", screen)
    assert re.search(r"b .*slow: 6 steps/s", screen)
    assert "round 1 waits for subnet 1 on b (0 of 50 steps)" in screen


def test_the_progress_tells_what_was_spent_and_the_price_of_an_hour() -> None:
    about = {"type": "m5.large", "zone": "a", "market": "spot", "usd_per_hour": 1.0, "on_demand_usd_per_hour": 3.6}
    machine = event("instance_launched", 0.0, t=time.time() - 3600, instance="i", role="worker", **about)
    assert re.search(r"\$1\.0\d* so far, \$1\.0\d*/h", screen_of([started(), machine]))


@pytest.mark.parametrize(("reply", "shown"), [("corrupt", True), ("stale-round", False), ("enough", False)])
def test_an_update_that_is_no_longer_needed_is_no_alarm(reply: str, shown: bool) -> None:
    line = describe_event(event("refused", 1.0, round=0, subnet=1, attempt=1, reply=reply))
    assert bool(line) is shown


def test_why_a_run_failed_is_a_line() -> None:
    ended = {"status": "failed", "rounds": 1, "params_sha256": None, "run_dir": "runs/t"}
    assert describe_event(event("run_ended", 1.0, **ended, reason="own: no such thing")) == "failed: own: no such thing"
    assert describe_event(event("run_ended", 1.0, **{**ended, "status": "completed"})) == "completed: 1 rounds are done"
