"""Read and check a job: one frozen tree of settings, and every fault in it as a sentence.

Imports nothing of torch, Dask or the cloud, so that reading a job costs milliseconds.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from idletrain.errors import JobError

_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Settings of training that are chosen for the fleet when a job leaves them out.
OPEN_SETTINGS = ("method", "subnets", "local_steps", "exchange")
# Settings that a resumed run must not change: they decide the run's bits.
FIXED_SETTINGS = (
    "model",
    "data",
    "training.method",
    "training.mode",
    "training.subnets",
    "training.local_steps",
    "training.batch_size",
    "training.loss",
    "training.optimizer",
    "training.exchange.pull",
    "training.exchange.push",
    "training.seed",
    "preemption.policy",
)
_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"  # a DNS label: it also names buckets and instances


def parse_seconds(value: Any) -> Any:
    """Parse `"15s"`, `"10m"` or a number as seconds.

    Raises:
        ValueError: the text is not a number with one of the units ms, s, m, h, d.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*(ms|[smhd]?)\s*", str(value))
    if isinstance(value, bool) or match is None:
        raise ValueError("should be a duration such as 15s, 10m or 4h")
    return float(match[1]) * _SECONDS[match[2]]


def parse_bytes(value: Any) -> Any:
    """Parse `"2GiB"`, `"500MB"` or a number as bytes.

    Raises:
        ValueError: the text is not a number with a unit of bytes.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMG]?I?B?)\s*", str(value).upper())
    if isinstance(value, bool) or match is None or match[2] not in _BYTES:
        raise ValueError("should be a size such as 512MiB or 2GB")
    return int(float(match[1]) * _BYTES[match[2]])


def _lower_bound(value: Any) -> Any:
    """Parse `2GiB..` (at least that much) as its lower bound in bytes."""
    return parse_bytes(value.removesuffix("..") if isinstance(value, str) else value)


def _one_or_pair(value: Any) -> Any:
    """Return a path or a pair of paths unchanged; refuse anything else with one sentence."""
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(path, str) for path in value)
    if not (pair or value is None or isinstance(value, str)):
        raise ValueError("should be an .npz file, or a pair [inputs, labels] of .npy or IDX files")
    return value


Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]
Paths = Annotated[str | tuple[str, str] | None, BeforeValidator(_one_or_pair)]
MinimumBytes = Annotated[int, BeforeValidator(_lower_bound), Field(gt=0)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Settings):
    """The module to train: a factory `package.module:function` and its keyword arguments."""

    factory: str
    """A function that returns an `nn.Module`, as `package.module:function`, imported from the working directory too."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    exclude: tuple[str, ...] = ()
    """Neuron groups that stay whole, by name (`idletrain plan` lists them)."""
    groups: dict[str, tuple[str | None, ...]] | None = None
    """Groups by hand: parameter name -> one entry per dimension, a group's name (`heads*3` when the
    dimension holds the group three times over) or null. Groups are discovered automatically when null."""
    fixed: tuple[str, ...] = ()
    """Groups whose partition is drawn once and kept for all rounds."""


class DataSettings(_Settings):
    """The data: a data set's name, files, or a factory that returns `(train, test)`."""

    name: Literal["fashion-mnist", "digits"] | None = None
    """A built-in data set."""
    path: str | None = None
    """The directory of that data set's files; the cache, Debian's package or a download when null."""
    train: Paths = None
    """Training data: one file with arrays x and y, or a pair of files for x and y; local or at `s3://`."""
    test: Paths = None
    """Test data, in the same forms; no evaluations when null."""
    factory: str | None = None
    """A function that returns `(train, test)`, as `package.module:function`; it runs on every machine."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    empty: Literal["drop", "keep"] = "drop"
    """Whether to drop or keep rows without labels in extreme-classification files (.txt, .svm, pairs of CSR .npz)."""
    propensity: tuple[float, float] = (0.55, 1.5)
    """A and B of PSP@k's propensities (Jain et al., KDD 2016); the repository names a pair for each data set."""
    test_rows: int | None = Field(default=None, ge=1)
    """Rows of such a test file that evaluations use, drawn once; all of them when null."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All files that `train` and `test` name, local or in S3."""
        entries = [entry for entry in (self.train, self.test) if entry is not None]
        return tuple(path for entry in entries for path in ([entry] if isinstance(entry, str) else entry))


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(_Settings):
    """The local optimizer, and whether its state travels with the neurons or is reset every round."""

    name: Literal["sgd", "adamw", "adagrad"] = "sgd"
    """`adagrad` is row-wise: one learning rate a row. With row-sparse gradients, `adamw` updates only their rows."""
    lr: float = Field(gt=0)
    """The learning rate of the first step."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of sgd."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of sgd and adamw."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """Decay rates of adamw's two moments."""
    start: float | dict[str, float] = 1e-6
    """Initial value of adagrad's sums of squares, for all parameters or by parameter name (1e-6 for the others): from
    zero, a row's first step would be as long as lr, however small its gradient."""
    state: Literal["travel", "reset"] = "travel"
    """Whether optimizer state travels with its neurons, or is reset in every round."""
    schedule: Literal["constant", "cosine"] = "constant"
    """How lr changes over the run: `cosine` lowers it to zero (Loshchilov & Hutter, arXiv 1608.03983)."""


class ExchangeSettings(_Settings):
    """Transport of parameters: codes save bytes by rounding values; biases, norms and optimizer state stay exact."""

    pull: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """The number format of values on their way to the workers."""
    push: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """The number format of changes on their way from the workers; int8 and int4 round up or down at random, so that the
    mean is right."""
    loss: Annotated[float, Field(ge=0, le=0.3)] = 0.0
    """Fraction of an int8 or int4 update that may arrive after its round: the values that changed least."""
    norm_loss: Annotated[float, Field(ge=0, le=0.3)] = 0.02
    """Largest fraction of the update's squared norm that may arrive later."""
    transport: Literal["tcp", "udp"] = "tcp"
    """`udp` sends datagrams; a worker that they do not reach uses tcp."""

    @property
    def coded(self) -> bool:
        """Return whether values travel in another format than float32 in either direction."""
        return (self.pull, self.push) != ("fp32", "fp32")


class TrainingSettings(_Settings):
    """Settings of training: the method, the rounds and the steps within one."""

    method: Literal["ist", "local-sgd"] = "ist"
    """`ist` trains independent subnets; `local-sgd` trains the whole network on every worker and averages the updates.
    Chosen for the fleet when left out."""
    mode: Literal["rounds", "lockstep"] = "rounds"
    """How the shards of a very wide output train: each by itself for a round, or all as one softmax, step by step."""
    subnets: int = Field(default=4, ge=1)
    """Independent subnets in a round. Chosen for the fleet when left out."""
    local_steps: int = Field(default=50, ge=1)
    """Steps of each subnet between two exchanges. Chosen for the fleet when left out."""
    rounds: int = Field(default=120, ge=1)
    """Rounds to train."""
    batch_size: int = Field(default=128, ge=1)
    """Samples per step and subnet."""
    loss: str = "cross_entropy"
    """`cross_entropy`, `bce_with_logits`, `mse`, `sampled_softmax`, or `package.module:function` for a function
    `(outputs, labels) -> scalar`."""
    optimizer: OptimizerSettings = OptimizerSettings(lr=0.1)
    """The local optimizer."""
    exchange: ExchangeSettings = ExchangeSettings()
    """How parameters travel. Also chosen for the fleet when method, subnets or local_steps is left out."""
    seed: int = 0
    """Every random number follows from it."""
    evaluate_every: int = Field(default=10, ge=1)
    """Rounds between two evaluations; rounds and not seconds, so that a stop is reproducible."""


class StopSettings(_Settings):
    """Conditions to end before the last round."""

    accuracy: float | None = Field(default=None, gt=0, le=1)
    """Accuracy on the test data at which the run ends."""


class NodeSettings(_Settings):
    """Number and size of nodes."""

    count: int = Field(default=4, ge=1)
    """Local workers, or machines of a cloud."""
    memory: MinimumBytes | None = None
    """RAM that each local worker may use, such as 2GiB; an equal part of the machine's free RAM when null. In a cloud:
    RAM that each machine must have for one subnet."""
    gpu: int = Field(default=0, ge=0)
    """GPUs that each machine of a cloud must have."""
    spot_policy: Literal["spot", "on-demand", "auto"] = "spot"
    """Kind of machines; `auto` requests on-demand machines where there is no spot capacity."""
    max_price: float | None = Field(default=None, gt=0)
    """USD per hour that one node may cost; up to the on-demand price when null."""
    budget_usd: float | None = Field(default=None, gt=0)
    """USD that the whole run may cost: machines carry it as their own deadline."""
    max_duration: Seconds = 4 * 3600.0
    """Time after which a run in a cloud ends, whatever happens; it can be resumed."""
    idle_duration: Seconds = 600.0
    """How long a run in a cloud waits without a single worker before it ends."""


class MemorySettings(_Settings):
    """Training of a subnet that is too large for a worker's memory."""

    budget: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)] | None = None
    """Memory that training may take on each worker, such as 1GiB: a figure to plan with, not enforced; all of the
    worker's memory when null."""
    out_of_core: Literal["auto", "never", "always"] = "auto"
    """Whether subnets are trained by a plan of what to keep, swap to disk and recompute: `auto` where a subnet does not
    fit and that is quicker than narrower subnets; the result is the same bits either way."""
    units: tuple[str, ...] = ()
    """Submodules of the model that are kept, swapped or recomputed as a whole, by name; discovered when empty."""
    scratch: str | None = None
    """A directory of each worker's local disk to swap to; /var/tmp when null."""


class PreemptionSettings(_Settings):
    """Handling of a subnet whose node is reclaimed."""

    policy: Literal["reissue", "salvage"] = "reissue"
    """`reissue`: every subnet takes all its steps, and the result has the same bits whatever happens. `salvage`: a
    round closes with the steps that are done."""
    progress_every: Seconds = 5.0
    """Time between two progress checkpoints: a subnet's state between two steps, from which another worker can
    continue."""
    lease: Annotated[Seconds, Field(ge=3.0)] = 10.0  # below it, noise would delay its ten heartbeats too much
    """Silence after which a subnet is leased to another worker: ten heartbeats, because workers of a busy machine can
    be silent for seconds; a process that dies is noticed at once by other means."""


class CheckpointSettings(_Settings):
    """Place of durable state, interval of writing the whole network, and number of snapshots kept."""

    to: str = "runs/"
    """The directory that holds run directories; for a run in a cloud, an `s3://` prefix."""
    every: Seconds = 60.0
    """Time between two snapshots of the whole network."""
    keep: int = Field(default=2, ge=1)
    """Snapshots to keep."""


NO_IMAGE = "cloud.image: is missing; build the Dockerfile, push the image, and name it there"


class CloudSettings(_Settings):
    """Place of a run's machines, when a cloud provides them."""

    region: str | None = None
    """The region, such as eu-west-1; the one of AWS' own configuration when null."""
    image: str | None = None
    """The container image that machines run, such as 123456789012.dkr.ecr.eu-west-1.amazonaws.com/idletrain:1."""
    ami: str | None = None
    """The machine image, which must have Docker; Amazon's ECS-optimized one when null."""
    head: str = "t3.medium"
    """The head node's instance type: its memory must hold two networks of float32, and for `sampler: auto`, which is
    tried there, one more with optimizer state and gradients."""
    profiles: tuple[str, str] = ("idletrain-head", "idletrain-node")
    """Instance profiles of the head node and of the nodes, as infra/aws creates them."""


class Job(_Settings):
    """A job file; its fields have the same names here."""

    name: Annotated[str, Field(pattern=_NAME)]
    """The run's name, and that of its directory below `checkpoint.to`: lower-case letters, digits and hyphens."""
    model: ModelSettings
    """The module to train."""
    data: DataSettings
    """The data."""
    training: TrainingSettings = TrainingSettings()
    """How to train."""
    stop: StopSettings = StopSettings()
    """When to end before the last round."""
    nodes: NodeSettings = NodeSettings()
    """How many nodes, and of what size."""
    memory: MemorySettings = MemorySettings()
    """How to train a subnet that is too large for a worker."""
    preemption: PreemptionSettings = PreemptionSettings()
    """How to continue when a node is taken away."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Where durable state is written."""
    cloud: CloudSettings = CloudSettings()
    """Where a cloud's machines are."""
    workdir: str | None = None
    """A directory whose files travel to a cloud's machines and are on their Python path."""

    @property
    def run_dir(self) -> Path:
        """The directory of this job's run, with all of its durable state."""
        return Path(self.checkpoint.to) / self.name

    def as_tree(self) -> dict[str, Any]:
        """Return the job as plain values for `parse_job`, with defaults except for settings that it leaves open."""
        given = self.training.model_fields_set
        return self.model_dump(mode="json", exclude={"training": {name for name in OPEN_SETTINGS if name not in given}})


def load_job(path: Path) -> Job:
    """Read a job file.

    Raises:
        JobError: the file is missing, is not YAML, or has faults; it holds all of them, one sentence each, with missing
            files and packages that the job names.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise JobError(f"{path}: cannot be read ({error.strerror}); name an existing job file") from None
    except yaml.YAMLError as error:
        raise JobError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:  # bytes that are not text, and dates such as 2024-13-01
        raise JobError(f"{path}: is not YAML in UTF-8: {error}") from None
    if not isinstance(tree, dict):
        raise JobError(f"{path}: should hold fields such as name, model and data; see workflows/digits.yaml")
    try:
        return parse_job(tree)
    except JobError as error:
        raise JobError([*error.faults, *_missing_targets(tree)]) from None


def parse_job(tree: dict[str, Any]) -> Job:
    """Check a job given as plain Python values, and return it.

    Raises:
        JobError: it has faults; holds all of them.
    """
    try:
        job = Job.model_validate(tree)
    except ValidationError as error:
        raise JobError([_sentence(fault) for fault in error.errors()]) from None
    if job.stop.accuracy is not None and job.training.loss == "mse":
        raise JobError("stop.accuracy: a network trained with training.loss: mse has none; leave it out")
    optimizer = job.training.optimizer
    if optimizer.name == "adagrad" and (optimizer.momentum or optimizer.weight_decay):
        raise JobError("training.optimizer: adagrad has neither momentum nor weight_decay; leave them out")
    if job.training.mode == "lockstep":
        _check_lockstep(job)
    if job.training.exchange.loss:
        _check_loss(job)
    if job.stop.accuracy is not None and job.data.train is not None and job.data.test is None:
        raise JobError("stop.accuracy: is measured on data.test, which is missing; name it, or leave stop out")
    return job


def _check_loss(job: Job) -> None:
    faults = []
    if job.preemption.policy != "salvage":
        faults.append(
            "training.exchange.loss: which rows are late depends on the link, and reissue promises the same bits; "
            "set preemption.policy: salvage, or leave it out"
        )
    if job.training.exchange.push not in ("int8", "int4"):
        faults.append(
            "training.exchange.loss: applies to int8 and int4 updates only; set training.exchange.push to int8"
        )
    if faults:
        raise JobError(faults)


def _check_lockstep(job: Job) -> None:
    faults = []
    if job.preemption.policy != "reissue":
        faults.append(
            "preemption.policy: salvage would close rounds without some shards; set it to reissue for lockstep"
        )
    if job.training.subnets > job.nodes.count:
        faults.append(
            f"training.subnets: {job.training.subnets} in lockstep need a node each, and nodes.count is "
            f"{job.nodes.count}; make them equal"
        )
    if faults:
        raise JobError(faults)


def resume_faults(job: Job, original: Job, status: str | None, rounds: int) -> list[str]:
    """Return why a run cannot be resumed: it is complete, or a setting that must stay has changed.

    Args:
        job: The job to resume it with.
        original: The job that the run began with.
        status: How the run ended last time.
        rounds: How many rounds are done.
    """
    if status == "completed" and job.training.rounds <= rounds:
        return [f"training.rounds: run {job.name} is complete after {rounds} rounds; ask for more to go on"]
    if status == "reached" and job.stop == original.stop:
        return [f"stop.accuracy: run {job.name} reached {job.stop.accuracy}; ask for more to go on"]
    faults = []
    by_rounds = (
        ("training.rounds",) if original.training.optimizer.schedule == "cosine" else ()
    )  # each step's lr follows from them
    for path in (*FIXED_SETTINGS, *by_rounds):
        old: object = original
        new: object = job
        for part in path.split("."):
            old, new = getattr(old, part), getattr(new, part)
        if old != new:
            was, now = str(old)[:120], str(new)[:120]
            faults.append(f"{path}: {now} is not what the run began with, {was}; take that or another name")
    return faults


def _missing_targets(tree: dict[str, Any]) -> Iterator[str]:
    """Yield a fault for each missing package and file that a faulty job names; a sound job opens them later."""
    model, data = (tree[s] if isinstance(tree.get(s), dict) else {} for s in ("model", "data"))
    for field, name in (("model.factory", model.get("factory")), ("data.factory", data.get("factory"))):
        package = name.replace(":", ".").split(".")[0] if isinstance(name, str) else ""
        if package and package not in sys.modules and importlib.util.find_spec(package) is None:
            yield f"{field}: {name!r} cannot be imported (No module named {package!r}); write it as package.module:name"
    for field in ("train", "test"):
        paths = data.get(field)
        for path in [paths] if isinstance(paths, str) else paths if isinstance(paths, list | tuple) else []:
            if isinstance(path, str) and not path.startswith("s3://") and not Path(path).expanduser().exists():
                yield f"data.{field}: {path} cannot be read (No such file or directory); name an existing file"


def _sentence(fault: Any) -> str:
    """Return a fault as one sentence: `field: value should be ...`."""
    field = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _fields_at(fault["loc"][:-1])
        close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{field}: is not a field of a job; {hint}"
    if fault["type"] == "missing":
        return f"{field}: is missing; {_purpose(fault['loc'])}"
    if fault["type"] == "string_pattern_mismatch":
        return f"{field}: {fault['input']!r} should be lower-case letters, digits and hyphens, at most 63"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{field}: {fault['input']!r} {message[:1].lower()}{message[1:]}"


def _settings_at(location: tuple[Any, ...]) -> type[BaseModel]:
    settings: type[BaseModel] = Job
    for part in location:
        settings = settings.model_fields[part].annotation  # type: ignore[assignment]
    return settings


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    return list(_settings_at(location).model_fields)


def _purpose(location: tuple[Any, ...]) -> str:
    examples = {
        "name": "name the run, for example name: fashion-mnist",
        "model": 'for example model: {factory: "idletrain.nn.models:mlp", args: {widths: [64, 128, 10]}}',
        "data": "for example data: {name: digits}",
        "lr": "for example lr: 0.1",
        "factory": 'for example factory: "package.module:function"',
    }
    return examples.get(str(location[-1]), "add it")
