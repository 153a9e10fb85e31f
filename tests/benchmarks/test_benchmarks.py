"""Every benchmark runs in its tiny form; what it writes is whole and sane. No time is asserted."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
import warm
from idletrain_testbed import Testbed, missing

import benchmarks.__main__ as everything
from benchmarks import machines, spot_latency
from benchmarks.report import at_least, at_most

MACHINE = {"cpu", "cores", "ram_bytes", "system", "python", "load_average"}


@pytest.fixture(autouse=True)
def warm_machines(monkeypatch):
    """The programs of a benchmark's machines are forks of the tests' warm parent, in the machines' namespaces."""
    execute, execute_on = machines.Loopback.popen, Testbed.popen

    def start(argv, namespace, how):
        return warm.start_on_node(argv, namespace, how["env"], Path(how["cwd"]), how["stderr"].fileno())

    def popen(self, node, argv, **how):
        return start(argv, None, how) or execute(self, node, argv, **how)

    def popen_on(self, node, argv, **how):
        return start(argv, self.instance.namespace_path(node), how) or execute_on(self, node, argv, **how)

    monkeypatch.setattr(machines.Loopback, "popen", popen)
    monkeypatch.setattr(Testbed, "popen", popen_on)


def _check_round_overhead(written):
    figures = {figure["what"]: figure["value"] for figure in written["figures"]}
    overhead, whole = figures.values()
    assert 0 < overhead < whole
    assert all(len(run) == 3 for runs in written["overheads_ms"].values() for run in runs)


def _check_memory_over_rounds(written):
    by_process = written["megabytes"]
    assert {"head", "scheduler"} < by_process.keys()
    assert len(by_process) == 4
    assert all(min(megabytes) > 10 for megabytes in by_process.values())


def _check_exchange(written):
    rates = [figure for figure in written["figures"] if figure["unit"] == "GB/s"]
    assert len(rates) == 6
    assert all(rate > 0 for figure in rates for rate in figure["samples"])
    assert len(written["figures"][-1]["samples"]) == 3


def _check_local_steps(written):
    mine, bare, ratio = (figure["value"] for figure in written["figures"])
    assert ratio == pytest.approx(bare / mine)


def _check_memory(written):
    figures = {figure["what"]: figure for figure in written["figures"]}
    assert 0 < figures["a subnet's parameters"]["value"] < figures["network's parameters"]["value"]
    assert all(growth > 0 for growth in figures["a worker's growth with checkpoints"]["samples"])
    # A process takes some 45 MB for its first step whatever the subnet: less than half of a network of 176 MB.
    assert figures["growth with checkpoints / the network's parameters"]["met"]
    assert figures["growth without checkpoints / the network's parameters"]["met"]


def _check_outofcore(written):
    figures = {figure["what"]: figure["value"] for figure in written["figures"]}
    assert written["rows"]
    for row in written["rows"]:
        assert row["same_bits"], row
        assert row["predicted_seconds"] > 0
        assert all(seconds > 0 for samples in row["seconds"].values() for seconds in samples)
    assert figures["parameters streamed: in-core / streamed bits differ"] == 0
    assert 0 < figures["planning 50 units"] < 5


def _check_churn(written):
    assert [run["policy"] for run in written["runs"]] == ["salvage", "reissue"]
    for run, cause in zip(written["runs"], ("notice", "kill"), strict=True):
        assert run["status"] == "stopped"
        assert run["preemptions"][cause] == 1
        assert 0 < run["goodput"] <= 1
        assert sum(run["shares"].values()) == pytest.approx(1)
        compute, outside = run["shares"]["compute"], run["shares"]["outside committed rounds"]
        assert compute - 0.02 <= run["goodput"] <= compute + outside + 0.02  # the last round was on its way


def _check_accuracy(written):
    assert {(run["family"], run["subnets"]) for run in written["runs"]} == {
        *(("mlp", subnets) for subnets in (1, 4)),
        *(("diabetes", subnets) for subnets in (1, 2, 4)),
    }
    assert all(0.2 < run["end"]["accuracy"] <= 1 for run in written["runs"] if run["family"] == "mlp")
    assert all(0.1 < run["end"]["loss"] < 2.5 for run in written["runs"])
    figures = {figure["what"] for figure in written["figures"]}
    assert {"mlp, 4 subnets, sgd 0.3: best temperature", "diabetes, 2 subnets, adamw 0.001: loss / whole"} <= figures


def _check_learning_rates(written):
    assert {(run["optimizer"], run["subnets"]) for run in written["runs"]} == {
        (optimizer, subnets) for optimizer in ("sgd", "adamw") for subnets in (1, 2)
    }
    figures = {figure["what"]: figure["value"] for figure in written["figures"]}
    assert figures["mlp, sgd, 2 subnets: best rate"] in (0.05, 0.1)
    assert figures["mlp, adamw, 1 subnets: loss at the rate best whole / at its best"] == 1


def _check_simulated_fleet(written):
    calm, short = written["fleets"]["inf h"], written["fleets"]["0.1 h"]
    assert calm.keys() == {"reissue", "salvage", "rolling", "data parallel, checkpoints", "data parallel, steps"}
    assert all(0 <= goodput <= 1 for by_kind in (calm, short) for goodput in by_kind.values())
    assert calm["data parallel, checkpoints"] == calm["data parallel, steps"] == 1
    assert short["rolling"] > short["data parallel, checkpoints"]


def _check_efficiency(written):
    (run,) = written["runs"]
    assert run["summary"]["status"] == "completed"
    assert 0 < run["evaluation_seconds"] < run["core_seconds"]
    assert all(seconds >= 0 for seconds in run["roles"].values())
    assert 0.5 < sum(run["roles"].values()) / run["core_seconds"] < 1.1
    assert all(0 < loops["core_seconds"] < run["core_seconds"] for loops in written["bare"])


def _check_offers(written):
    assert all(figure["value"] > 0 for figure in written["figures"])


def _check_spot_latency(written):
    launch, successor, notice = (figure["value"] for figure in written["figures"])
    assert 0 < successor < launch
    assert 0 < notice < spot_latency.NOTICE_SECONDS


def _check_codec(written):
    figures = {figure["what"]: figure["value"] for figure in written["figures"]}
    assert figures["push, int4: squared norm that arrives"] < figures["push, int8: squared norm that arrives"] < 1
    assert figures["push, int4: bytes of float32's"] < figures["push, int8: bytes of float32's"] < 0.5


def _check_kernels(written):
    for ours, torchs, ratio in zip(*[iter(written["figures"])] * 3, strict=True):
        assert ratio["value"] == pytest.approx(ours["value"] / torchs["value"])


def _check_label_cost(written):
    assert list(written["results"]) == ["uniform"]
    assert all(one["ms"] > 0 and one["memory"] > 0 for one in written["results"]["uniform"].values())


def _check_linear_trees(written):
    start, rate, end = (f["value"] for f in written["figures"] if "idletrain, hidden 16" in f["what"])
    assert rate in (0.001, 0.005, 0.02, 0.05)
    assert 0 <= start < 100
    assert 0 < end <= 100


def _check_wide_labels(written):
    scores = [figure for figure in written["figures"] if figure["unit"] == "P@1"]
    assert all(0 <= figure["value"] <= 100 for figure in scores)
    assert {"step 0", "dense", "uniform 1k", "inverted file"} <= {
        f["what"].split(": ")[1].split(" after")[0] for f in scores
    }


def _check_wide_exchange(written):
    assert list(written["runs"]) == ["rounds", "lockstep", "row-sparse data parallel", "dense data parallel"]
    assert all(run["step_seconds"] > 0 for run in written["runs"].values())
    assert [len(written["runs"][mode]["points"]) for mode in ("rounds", "lockstep")] == [2, 2]


def _check_wide_scale(written):
    figures = {figure["what"]: figure["value"] for figure in written["figures"]}
    assert figures["parameters"] == pytest.approx((300 * 16 + 500 * 16 + 500) / 1e6)
    assert figures["bytes moved a step"] > 0


def _check_where_time_goes(written):
    shares = [figure["value"] for figure in written["figures"] if figure["unit"] == "of the workers' time"]
    assert len(shares) == 8
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)
    rates = [figure["value"] for figure in written["figures"] if figure["unit"] == "MB/s"]
    assert len(rates) == 4
    assert min(rates) > 0
    assert [round_["number"] for round_ in written["rounds"]] == [0, 1, 2, 3]


def _check_scale(written):
    assert [size["workers"] for size in written["sizes"]] == [2, 4]
    for size in written["sizes"]:
        assert len(size["rounds"]) == 2
        assert all(round_["overhead_seconds"] > 0 for round_ in size["rounds"])
        assert all(round_["store_bytes"] > 0 for round_ in size["rounds"])


def _check_page(written):
    assert written["workers_shown"] == 5
    assert all(0 < gap < 5 for gap in written["figures"][4]["samples"])


def _check_link_use(written):
    transfers = ["plain socket, down", "pull", "plain socket, up", "push"]
    assert [figure["what"].split(": ")[1] for figure in written["figures"]] == [*transfers * 2, "pull", "push"]
    assert all(figure["value"] > 0 for figure in written["figures"])
    assert [len(figure["samples"]) for figure in written["figures"]] == [2] * 8 + [0] * 2


def _check_bad_links(written):
    for ways in written["found"].values():
        assert set(ways) == {"CUBIC", "BBR", "datagrams"}
        assert all(len(samples) == 2 and min(samples) > 0.5 for samples in ways.values())


def _check_coded_accuracy(written):
    runs = written["runs"]
    assert {run["case"] for run in runs} == {"whole", "dropped", "salvaged"}
    assert all(0.2 < run["accuracy"] <= 1 for run in runs)
    sizes = {tuple(run["codes"]): run["bytes"] for run in runs}
    kinds = (("int4", "int4"), ("int8", "int4"), ("int8", "int8"), ("bf16", "int8"), ("fp32", "fp32"))
    assert [sizes[codes] for codes in kinds] == sorted(set(sizes.values()))


def _check_lossy_rounds(written):
    (records,) = written["runs"].values()
    assert len(records) == 3
    assert all(run["curve"][-1][3] >= run["target"] for runs in records.values() for run in runs)


def _check_fabric(written):
    (rate,) = written["figures"]
    assert 0 <= rate["value"] < 0.5
    assert len(rate["samples"]) == 2  # a pair, each way


def _check_forecast(written):
    figures = {figure["what"].split(": ")[-1]: figure for figure in written["figures"]}
    assert all(value >= 0 for figure in figures.values() for value in figure["samples"])
    assert figures["a first measurement, at worst"]["value"] == figures["the first measurement"]["value"] > 0
    assert min(*figures["compute, measured"]["samples"], *figures["compute, expected"]["samples"]) > 0
    off, ratios = figures["off by"]["value"], figures["off by"]["samples"]
    assert off == pytest.approx(abs(statistics.median(ratios) - 1))
    shares = zip(figures["stolen from measurements"]["samples"], figures["stolen from rounds"]["samples"], strict=True)
    steady = [abs(look - rounds) <= 0.05 for look, rounds in shares]
    assert len(ratios) == (sum(steady) or len(steady))
    assert figures["cases within 15 %"]["value"] == (off <= 0.15)


def _check_autotune(written):
    assert [run["setting"] for run in written["runs"]] == [0, 1, 0, 1, 0]  # there and back
    assert written["why"]
    mine, by_hand, ratio = written["figures"]
    assert (len(mine["samples"]), len(by_hand["samples"])) == (3, 2)
    assert ratio["value"] == pytest.approx(mine["value"] / by_hand["value"])


def _check_fine_tuning(written):
    accuracies = {figure["what"]: figure["value"] for figure in written["figures"]}
    assert len(accuracies) == 13
    assert all(0 <= accuracy <= 100 for accuracy in accuracies.values())


def _check_finishing(written):
    losses = {figure["what"]: figure["value"] for figure in written["figures"] if figure["what"].endswith(": loss")}
    assert len(losses) == (4 + 6) * 2
    assert all(loss > 0 for loss in losses.values())
    assert [run["rounds"] for run in written["runs"] if not run.get("as_long")] == [6] * 4 + [3] * 4
    assert sum(bool(run.get("as_long")) for run in written["runs"]) == 6 * 2


def _check_precision(written):
    steps = {figure["what"]: figure["samples"] for figure in written["figures"] if figure["unit"] == "ms"}
    assert list(steps) == ["transformer, float32: a step", "transformer, bfloat16: a step"]
    assert all(min(samples) > 0 for samples in steps.values())


def _check_outofcore_gpu(written):
    assert written["gpu"]
    for row in written["rows"]:
        assert row["same_bits"], row
        assert all(seconds > 0 for samples in row["seconds"].values() for seconds in samples)


def _check_quality(written):
    runs, costs = written["runs"], written["costs"]["MLP"]
    assert {run["method"] for run in runs} == {*costs}
    assert {run["rate"] for run in runs if run["method"] == "ist, 4"} == {0.1, 0.2}
    chosen = min((run for run in runs if run["method"] == "2 copies, 4"), key=lambda run: run["validation"])
    (finished,) = (run for run in runs if "same arithmetic" in run["method"])
    assert finished["rate"] == chosen["rate"]
    assert finished["rounds"] < chosen["rounds"]
    assert costs["ist, 4"]["bytes"] < costs["2 copies, 4"]["bytes"] < costs["whole"]["bytes"]


def _check_splits(written):
    shares = {(run["split"], run["copies"]): run["share"] for run in written["runs"]}
    assert shares["whole", 1] == 1
    assert len(shares) == 7
    for split in ("neurons", "blocks", "both"):
        assert shares[split, 1] < shares[split, 2] < 1
    assert len({run["loss"] for run in written["runs"]}) == 7


def _check_defaults(written):
    losses = {run["alternative"]: run["loss"] for run in written["runs"]}
    assert len(losses) == len(set(losses.values())) == 6
    (judged,) = (figure for figure in written["figures"] if figure["target"])
    assert judged["value"] == losses["default"] / min(losses.values())


def _check_rolling(written):
    losses = {(run["family"], run["policy"]): run["loss"] for run in written["runs"]}
    assert len(losses) == len(set(losses.values())) == 2 * 4
    judged = [figure["what"] for figure in written["figures"] if figure["target"]]
    assert judged == ["mlp: accuracy of rolling - reissue", "diabetes: loss of rolling / reissue"]


def _check_slow_worker(written):
    (pace,) = written["paces"].values()
    assert 0 < pace["alone"] < 3 / 0.01
    assert 0 < pace["together"] < 3.5 / 0.01  # of four quick workers it would be more


CHECKS = {
    "slow_worker": _check_slow_worker,
    "defaults": _check_defaults,
    "rolling": _check_rolling,
    "splits": _check_splits,
    "fine_tuning": _check_fine_tuning,
    "finishing": _check_finishing,
    "precision": _check_precision,
    "bad_links": _check_bad_links,
    "coded_accuracy": _check_coded_accuracy,
    "lossy_rounds": _check_lossy_rounds,
    "forecast": _check_forecast,
    "autotune": _check_autotune,
    "fabric": _check_fabric,
    "codec": _check_codec,
    "kernels": _check_kernels,
    "label_cost": _check_label_cost,
    "linear_trees": _check_linear_trees,
    "wide_labels": _check_wide_labels,
    "wide_exchange": _check_wide_exchange,
    "wide_scale": _check_wide_scale,
    "link_use": _check_link_use,
    "page": _check_page,
    "round_overhead": _check_round_overhead,
    "exchange": _check_exchange,
    "local_steps": _check_local_steps,
    "memory": _check_memory,
    "memory_over_rounds": _check_memory_over_rounds,
    "outofcore": _check_outofcore,
    "outofcore_gpu": _check_outofcore_gpu,
    "quality": _check_quality,
    "churn": _check_churn,
    "efficiency": _check_efficiency,
    "accuracy": _check_accuracy,
    "learning_rates": _check_learning_rates,
    "simulated_fleet": _check_simulated_fleet,
    "offers": _check_offers,
    "spot_latency": _check_spot_latency,
    "where_time_goes": _check_where_time_goes,
    "scale": _check_scale,
}


# Those that shape links or need a GPU, and what they lack on this machine.
NEEDY = {"link_use": missing(), "fabric": missing(), "wide_exchange": missing()}
NEEDY |= {"bad_links": missing(delay=True, loss=True)}
NEEDY |= {} if torch.cuda.is_available() else {"outofcore_gpu": ["there is no CUDA device"]}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(bool(lack := NEEDY.get(name)), reason=" ".join(lack or ())))
        for name in CHECKS
    ],
)
def test_a_tiny_run_writes_its_figures(name, tmp_path, capsys):
    path = tmp_path / "out" / f"{name}.json"
    result = importlib.import_module(f"benchmarks.{name}").main(["--tiny", "--json", str(path)])
    written = json.loads(path.read_text())
    assert written == json.loads(json.dumps(result))
    assert written["benchmark"] == name
    assert written["tiny"]
    assert set(written["machine"]) == MACHINE
    assert {"idletrain", "torch", "distributed"} <= set(written["versions"])
    assert written["figures"]
    for figure in written["figures"]:
        assert math.isfinite(figure["value"]), figure
        assert (figure["met"] is None) == (figure["target"] == ""), figure
    assert any(figure["target"] for figure in written["figures"])
    assert name in capsys.readouterr().out
    CHECKS[name](written)


def test_every_benchmark_of_the_list_is_tried_here():
    assert set(everything.NAMES) <= CHECKS.keys()


def test_targets_are_inclusive():
    assert at_most("", 2.0, "", 2.0).met
    assert not at_most("", 2.1, "", 2.0).met
    assert at_least("", 2.0, "", 2.0).met
    assert not at_least("", 1.9, "", 2.0).met


def test_an_unknown_benchmark_is_refused(capsys):
    with pytest.raises(SystemExit):
        everything.main(["nothing"])
    assert "there is no benchmark nothing" in capsys.readouterr().err
