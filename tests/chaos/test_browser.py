"""The dashboard's page and the report, as a person sees them in a browser while workers come and go."""

from __future__ import annotations

import base64
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from idletrain.cluster import access
from idletrain.observe import charts
from idletrain.observe.status import View, view_of
from idletrain.observe.summary import summarise

from .helpers import Control, Run, until

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WINDOWS = {"wide": (1400, 1000), "narrow": (500, 900)}  # Chromium's windows are not narrower
CONTRAST = 4.5  # of text, WCAG 2.1, level AA
# The least contrast of any text on the page with what is behind it.
LEAST_CONTRAST = """
const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
  if (c[3] > 0) return c; } return [255, 255, 255, 1]; };
let least = [99, ""];
for (const e of document.querySelectorAll(".idletrain *")) {
  const text = [...e.childNodes].filter(n => n.nodeType === 3 && n.data.trim()).map(n => n.data.trim()).join(" ");
  if (!text || e.closest("svg") || e.disabled || !e.offsetParent) continue;
  const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  if (ratio < least[0]) least = [ratio, e.className + ": " + text.slice(0, 40)];
}
return least;
"""

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs a browser: Debian's packages chromium and chromium-driver"
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    assert BROWSER
    assert DRIVER
    options = ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path}/browser",
    ):
        options.add_argument(argument)
    driver = Chrome(options, Service(DRIVER))
    driver.set_window_size(*WINDOWS["wide"])  # Dask folds its navigation up in a narrower one
    yield driver
    driver.quit()


def figures(browser: Chrome) -> dict[str, str]:
    """The figures that the page shows, by what they are of."""
    script = (
        "return [...document.querySelectorAll('[data-key]')].map(e => [e.dataset.key, e.firstChild.textContent.trim()])"
    )
    return dict(browser.execute_script(script))


def expected(view: View) -> dict[str, str]:
    """What it should show of a view."""
    return {
        "status": view["status"],
        "rounds": str(view["rounds"]),
        "accuracy": charts.fixed(view["accuracy"]),
        "loss": charts.fixed(view["loss"]),
        "goodput": charts.percent(view["goodput"]),
        "preemptions": str(view["preemptions"]["notice"] + view["preemptions"]["kill"]),
        "lost_steps": charts.number(view["lost_steps"]),
        "local_steps": charts.number(view["local_steps"]),
        "bytes_per_second": charts.size(view["bytes_per_second"]) + "/s",
        "spent_usd": "-",
    }


def workers(browser: Chrome) -> dict[str, str]:
    """The states that the page shows, by worker."""
    script = (
        "return [...document.querySelectorAll('tr[data-worker]')]"
        ".map(e => [e.dataset.worker, e.querySelector('.state').classList[1]])"
    )
    return dict(browser.execute_script(script))


def cells(browser: Chrome) -> dict[str, list[str]]:
    """The grid's states, by round."""
    script = (
        "return [...document.querySelectorAll('.cells')]"
        ".map(e => [e.dataset.round, [...e.children].map(c => c.classList[1])])"
    )
    return dict(browser.execute_script(script))


def records(run: Run) -> View:
    return view_of(summarise(run.dir / "events.jsonl"), time.time())


def shows_the_records(browser: Chrome, run: Run) -> bool:
    view = records(run)
    shown, wanted = figures(browser), expected(view)
    return (
        {key: shown.get(key) for key in wanted} == wanted
        and workers(browser) == {row["name"]: row["state"] for row in view["workers"]}
        and cells(browser) == {str(row["round"]): [c["state"] for c in row["cells"]] for row in view["grid"]}
    )


def press(browser: Chrome, name: str, what: str) -> None:
    browser.find_element(By.CSS_SELECTOR, f"tr[data-worker='{name}'] button[data-ask='{what}']").click()


def as_owner(run: Run, url: str) -> urllib.request.Request:
    token = (access.folder_of(run.dir) / access.TOKEN_FILE).read_text()
    return urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})


def answers(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=30):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def training(run: Run) -> list[dict[str, Any]]:
    return [row for row in records(run)["workers"] if row["state"] == "training"]


def looks_right(browser: Chrome, name: str, to: Path) -> None:
    """On a wide and on a narrow window, light and dark: nothing sticks out, all text can be read."""
    for colours in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": colours}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        for window, size in WINDOWS.items():
            browser.set_window_size(*size)
            shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
            (to / f"{name}-{window}-{colours}.png").write_bytes(base64.b64decode(shot["data"]))
            wide = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
            assert wide[0] <= wide[1], (window, colours)
            contrast, where = browser.execute_script(LEAST_CONTRAST)
            assert contrast >= CONTRAST, (colours, where)


def test_a_person_watches_a_run_whose_workers_die(
    make_run: Callable[..., Run], control: Control, browser: Chrome, tmp_path: Path
) -> None:
    run = make_run(rounds=10_000, subnets=3, nodes=2, training={"evaluate_every": 1})
    control.pace(0.02)
    head = run.launch("--allow-control")
    page = run.wait("the start", "run_started")["dashboard"]
    assert page.startswith("http://127.0.0.1:")
    assert page.endswith("/idletrain")
    until("two workers", lambda: len(training(run)) == 2)
    until("the page", lambda: answers(as_owner(run, page)))
    browser.get(page)
    assert "open the link with the token" in browser.page_source
    assert all("403" in line["message"] for line in browser.get_log("browser"))  # which forgets them
    browser.get(access.link(run.dir, page.replace("/idletrain", "/status")))
    assert browser.current_url == page.replace("/idletrain", "/status")
    browser.find_element(By.LINK_TEXT, "Idletrain").click()  # in Dask's own navigation
    assert browser.current_url == page

    killed, drained = (row["name"] for row in training(run))
    until("them", lambda: workers(browser) == {killed: "training", drained: "training"})
    assert browser.find_element(By.ID, "workers").text.count("Drain") == 2
    press(browser, killed, "kill")
    browser.switch_to.alert.accept()
    run.wait("the killed one's end", "worker_left", lambda e: (e["name"], e["cause"]) == (killed, "kill"))
    control.hold()  # nobody steps while the page is compared
    until("the page to show the records", lambda: shows_the_records(browser, run))
    assert workers(browser)[killed] == "gone"
    assert figures(browser)["preemptions"] == "1"
    looks_right(browser, "page", tmp_path)
    control.release()
    press(browser, drained, "drain")
    run.wait("the drained one's end", "worker_left", lambda e: (e["name"], e["cause"]) == (drained, "notice"))
    until("the page to say so", lambda: workers(browser)[drained] == "gone")

    with urllib.request.urlopen(as_owner(run, page.replace("/idletrain", "/metrics")), timeout=30) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    preemptions = {s.labels["cause"]: s.value for s in families["idletrain_preemptions"].samples}
    assert preemptions == {"notice": 1, "kill": 1}
    # Dask's own pages show tasks by this name.
    prefixes = {s.labels["task_prefix_name"] for s in families["dask_scheduler_tasks_compute_seconds"].samples}
    assert "train-subnet" in prefixes
    severe = [line["message"] for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    icon = page.replace("/idletrain", "/favicon.ico")  # which the browser asked for beside the refused page, some time
    assert not [message for message in severe if not (message.startswith(icon) and "403" in message)]

    head.send(signal.SIGINT)
    assert head.exit_code() == 130, head.text
    until("the page to tell", lambda: browser.find_element(By.ID, "fault").is_displayed())

    done = subprocess.run(
        [sys.executable, "-m", "idletrain", "report", str(run.dir)], capture_output=True, text=True, check=True
    )
    assert f"goodput {expected(records(run))['goodput']}" in done.stdout
    browser.get((run.dir / "report.html").as_uri())
    view = records(run)
    shown = figures(browser)
    assert {key: shown.get(key) for key in expected(view)} == expected(view)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    looks_right(browser, "report", tmp_path)
