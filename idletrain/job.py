"""Define a job: one frozen tree of settings. `job_file` reads and checks it.

Imports nothing of torch, Dask or the cloud, so that reading a job costs milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from idletrain.machine_settings import CloudSettings, NodeSettings
from idletrain.optimizer_settings import MicroBatch, OptimizerSettings, OuterOptimizerSettings
from idletrain.phases import PhaseSettings, TrainingPhase, finishing_whole, in_order, spelled_out
from idletrain.quantities import parse_bytes
from idletrain.strict_settings import Arguments, Count, Place, Seconds, StrictSettings, absolute_place

# Settings of training that are chosen for the fleet when a job leaves them out.
OPEN_SETTINGS = ("method", "subnets", "copies", "local_steps", "finish_whole", "exchange")
_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"  # a DNS label: it also names buckets and instances


def _number_or_range(value: Any) -> Any:
    """Return a number of subnets unchanged; refuse a range, as only one that cannot be made phases of is left here."""
    if isinstance(value, dict):
        raise ValueError(
            "should be a number, or a range such as {start: 8, end: 2} of which each phase has half as many as the one "
            "before, with at least a round for each and without phases beside it"
        )
    return value


def _one_or_pair(value: Any) -> Any:
    """Return a path or a pair of paths, absolute where they begin at home; refuse anything else with one sentence."""
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(path, str) for path in value)
    if not (pair or value is None or isinstance(value, str)):
        raise ValueError("should be an .npz file, or a pair [inputs, labels] of .npy or IDX files")
    if isinstance(value, str):
        return absolute_place(value)
    return tuple(map(absolute_place, value)) if pair else value


Subnets = Annotated[int, BeforeValidator(_number_or_range), Field(ge=1, le=2**31 - 1)]
Split = Literal["neurons", "blocks", "both"]
Paths = Annotated[str | tuple[str, str] | None, BeforeValidator(_one_or_pair)]


class ModelSettings(StrictSettings):
    """The module to train: a factory `package.module:function` and its keyword arguments."""

    factory: str
    """A function that returns an `nn.Module`, as `package.module:function`, imported from the working directory too."""
    args: Arguments = {}
    """Keyword arguments of the factory."""
    exclude: tuple[str, ...] = ()
    """Neuron groups that stay whole, by name (`idletrain plan` lists them)."""
    groups: dict[str, tuple[str | None, ...]] | None = None
    """Groups by hand: parameter name -> one entry per dimension, a group's name (`heads*3` when the
    dimension holds the group three times over) or null. Groups are discovered automatically when null."""
    fixed: tuple[str, ...] = ()
    """Groups whose partition is drawn once and kept for all rounds."""
    split: Split = "neurons"
    """What subnets divide: the `neurons` of every layer, or whole residual `blocks`, each in `training.copies` of a
    round's subnets (ResIST, Dun et al., arXiv 2107.00961), or `both`: the subnets that have a block divide its neurons.
    A subnet passes over the blocks that it lacks."""


class DataSettings(StrictSettings):
    """The data: a data set's name, files, or a factory that returns `(train, test)`."""

    name: Literal["fashion-mnist", "digits"] | None = None
    """A built-in data set."""
    path: Place | None = None
    """The directory of that data set's files; the cache, Debian's package or a download when null."""
    train: Paths = None
    """Training data: one file with arrays x and y, or a pair of files for x and y; local or at `s3://`."""
    test: Paths = None
    """Test data, in the same forms; no evaluations when null."""
    image_size: Count | None = None
    """Height and width that a folder's images are scaled to; null if they have one size already."""
    num_workers: Annotated[int, Field(ge=0, le=1000)] = 0
    """Processes beside each worker that read and decode a folder's images ahead of the step that needs them."""
    factory: str | None = None
    """A function that returns `(train, test)`, `{"train": ..., "test": ...}` or training data alone, as
    `package.module:function`; each part is what `idletrain.fit` takes. It runs on every machine."""
    args: Arguments = {}
    """Keyword arguments of the factory."""
    empty: Literal["drop", "keep"] = "drop"
    """Whether to drop or keep rows without labels in extreme-classification files (.txt, .svm, pairs of CSR .npz)."""
    propensity: tuple[float, float] = (0.55, 1.5)
    """A and B of PSP@k's propensities (Jain et al., KDD 2016); the repository names a pair for each data set."""
    test_rows: Count | None = None
    """Rows of such a test file that evaluations use, drawn once; all of them when null."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All files that `train` and `test` name, local or in S3."""
        entries = [entry for entry in (self.train, self.test) if entry is not None]
        return tuple(path for entry in entries for path in ([entry] if isinstance(entry, str) else entry))


class ExchangeSettings(StrictSettings):
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


class MetricSettings(StrictSettings):
    """A metric on the test data."""

    metric: str
    """A torchmetrics metric or a function `(outputs, labels) -> number`, as `package.module:name`."""
    args: Arguments = {}
    """Arguments by name: of the metric's class, or of the function beside outputs and labels."""
    better: Literal["higher", "lower"] | None = None
    """Which of two values is the better one; torchmetrics' metrics know it."""


class TrainingSettings(StrictSettings):
    """Settings of training: the method, the rounds and the steps within one."""

    method: Literal["ist", "local-sgd"] = "ist"
    """`ist` trains independent subnets; `local-sgd` trains the whole network on every worker and averages the updates.
    Chosen by forecast and trial when left out; the default is for a fleet that cannot be measured. Where less than 30 %
    of a model can be split, `ist` becomes `local-sgd`."""
    instead_of: Literal["ist"] | None = None
    """The method that the job named and its model does not suit; written by idletrain into the run's own copy."""
    mode: Literal["rounds", "lockstep"] = "rounds"
    """How the shards of a very wide output train: each by itself for a round, or all as one softmax, step by step."""
    subnets: Subnets = 4
    """Independent subnets in a round. Chosen for the fleet when left out; the default is for a fleet that cannot be
    measured. `{start: 8, end: 2}` stands for phases of 8, 4 and 2 subnets, of equally many rounds."""
    copies: Count = 1
    """Number of a round's subnets that every neuron is in; their updates are averaged. 1 is independent subnet training
    (Yuan et al., arXiv 1910.02120); more let subnets overlap and be wider (subnetwork data parallelism, Singh et al.,
    arXiv 2507.09029); as many as subnets is local SGD. Chosen with the method when that is left out."""
    slack: float = Field(default=0.5, gt=0, le=100)
    """Under `rolling`, neurons that no subnet holds, as a part of those that are held."""
    local_steps: Count = 50
    """Steps of each subnet between two exchanges. Chosen for the fleet when left out; the default is for a fleet that
    cannot be measured."""
    phases: tuple[PhaseSettings, ...] = ()
    """How the rounds divide the network, such as `[{rounds: 90, subnets: 8}, {rounds: 30, subnets: 1}]`: each phase has
    `rounds`, and `subnets`, `copies` or `local_steps` of its own. All rounds divide it alike when empty."""
    finish_whole: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rounds, the last ones, in which every subnet is the whole network, as in local SGD, so that neurons
    learn to work together: 0.2 for a fifth, but at least one and not all of several. Chosen with the method when that
    is left out."""
    rounds: Count = 120
    """Rounds to train; those of all `phases` together. Where neither they nor `epochs` are named, 120, or as many as 50
    passes over the data take if these are fewer, but at least 10."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training data by all subnets together, in place of `rounds`."""
    batch_size: Count = 128
    """Samples per step and subnet."""
    micro_batch: MicroBatch = None
    """Samples that go through the module at a time; the gradients of a step's micro-batches are added up (gradient
    accumulation). `auto`: as many as fit into `memory.budget` in a subnet of the mean share. When null, all; but as by
    `auto` where the budget does not hold a step, gradients add up, and `memory.out_of_core` is `auto`."""
    ghost_batches: bool = False
    """Whether BatchNorm may take its statistics from micro-batches (ghost batches, arXiv 1705.08741)."""
    loss: str | None = None
    """`cross_entropy`, `bce_with_logits`, `mse`, `sampled_softmax`, `model` for the one that the model returns with its
    outputs (`outputs.loss`), or `package.module:function` for a function `(outputs, labels) -> scalar`, which gets the
    whole batch instead of labels if samples are dicts. When null, the model's own where it returns one for dicts, else
    `cross_entropy`."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Label smoothing of cross_entropy in training, as of `torch.nn.CrossEntropyLoss`; evaluations have none."""
    ema: float | None = Field(default=None, ge=0, lt=1)
    """Decay a round of an exponential moving average of the network, such as 0.9. Evaluations and the exported network
    are the average's; training goes on from the network itself. The head node holds one more network for it."""
    optimizer: OptimizerSettings = OptimizerSettings(name="adamw", lr=1e-3)
    """The local optimizer; AdamW with lr 0.001 when left out."""
    outer_optimizer: OuterOptimizerSettings | None = None
    """How the changes of a round move parameters that several subnets train: by their mean when null, else by an outer
    optimizer (`{name: nesterov, lr: 0.7, momentum: 0.9}`). The head node holds one more network for its momentum."""
    exchange: ExchangeSettings = ExchangeSettings()
    """How parameters travel. Also chosen for the fleet when method, subnets or local_steps is left out."""
    buffers: dict[str, Literal["mean", "sum", "estimate"]] = {}
    """What becomes of buffers that training changes, by name or pattern (`*.codebook`), the first that fits: the `mean`
    of the subnets' values, the `sum` of their changes, or an `estimate` on the assembled network. Of the others,
    statistics of the data are estimated, counters summed, and what training reads is averaged."""
    precision: Literal["float32", "bfloat16"] | None = None
    """What a step computes in: `bfloat16` by `torch.autocast`, as in a model whose parameters are bfloat16 or float16,
    or `float32`, as in others, when null. Parameters and optimizer state are float32 in any case."""
    compile: bool = False
    """Whether workers compile their subnets by `torch.compile`, which needs a C++ compiler on each. Compiled subnets
    train in core, in micro-batches where `memory.budget` asks for them."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Every random number follows from it."""
    evaluate_every: Count = 10
    """Rounds between two evaluations, the first of which follows round 1; rounds and not seconds, so that a stop is
    reproducible. Without `stop` no round waits for an evaluation: one that comes due while another is going on is left
    out, except the last; and before the last, without `metrics`, 2,048 of the test samples are used."""
    metrics: dict[str, MetricSettings] = {}
    """Metrics on the test data by name, each `{metric: "torchmetrics.classification:BinaryAUROC"}`; `args` are its
    arguments, and `better: higher` or `lower` says of a function `(outputs, labels) -> number` which value is the
    better one."""

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, settings: Any) -> Any:
        return spelled_out(settings)

    @property
    def listed_phases(self) -> tuple[PhaseSettings, ...]:
        """The phases that the job lists, or those that `finish_whole` stands for; none where all rounds are alike."""
        if self.phases or not self.finish_whole:
            return self.phases
        last = min(self.rounds - 1, round(self.finish_whole * self.rounds))
        return finishing_whole(self.rounds, max(1, last), self.subnets)

    @property
    def phases_field(self) -> str:
        """The setting that says of which phases the run is."""
        return "training.finish_whole" if self.finish_whole else "training.phases"

    @property
    def every_phase(self) -> tuple[TrainingPhase, ...]:
        """The phases with nothing left out; a single one where the job has none."""
        given = self.listed_phases or (PhaseSettings(rounds=self.rounds),)
        return tuple(in_order(given, self.subnets, self.copies, self.local_steps))

    def phase(self, round_: int) -> TrainingPhase:
        """Return the phase of a round; of those after the last, the last."""
        return next(phase for phase in reversed(self.every_phase) if phase.first_round <= round_)

    @property
    def steps(self) -> int:
        """Local steps that each subnet takes in the whole run."""
        last = self.every_phase[-1]
        return last.steps_before(last.first_round + last.rounds)

    @property
    def trains_whole(self) -> bool:
        """Whether every subnet of every round is the whole network, as in local SGD."""
        return self.method == "local-sgd" or all(phase.averages_whole_networks for phase in self.every_phase)

    def as_local_sgd(self) -> TrainingSettings:
        """Return the settings with local SGD in place of the job's method, which does not suit the model."""
        phases = tuple(phase.model_copy(update={"copies": None}) for phase in self.phases)
        changes = {"method": "local-sgd", "instead_of": self.method, "copies": 1, "phases": phases, "finish_whole": 0.0}
        return self.model_copy(update=changes)


class StopSettings(StrictSettings):
    """Conditions to end before the last round."""

    accuracy: float | None = Field(default=None, gt=0, le=1)
    """Accuracy on the test data at which the run ends."""
    metric: str | None = None
    """What tells the best network: `loss`, `accuracy` or one of `training.metrics`; `loss` when null and `patience` is
    set. The best network's snapshot is kept, and it is the one that the run gives."""
    patience: Count | None = None
    """Evaluations in a row without a better network after which the run ends."""

    @property
    def watched(self) -> str | None:
        """What tells the best network, or None if none is kept."""
        return self.metric or ("loss" if self.patience else None)


class MemorySettings(StrictSettings):
    """Training of a subnet that is too large for a worker's memory."""

    budget: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)] | None = None
    """Memory that training may take on each worker, such as 1GiB: a figure to plan with, not enforced; all of the
    worker's memory when null."""
    out_of_core: Literal["auto", "never", "always"] = "auto"
    """Whether subnets are trained by a plan of what to keep, swap to disk and recompute: `auto` where a subnet does not
    fit, micro-batches do not help, and a plan is quicker than narrower subnets; a plan does not change the bits."""
    units: tuple[str, ...] = ()
    """Submodules of the model that are kept, swapped or recomputed as a whole, by name; discovered when empty."""
    compile: Literal["auto", "never"] = "never"
    """Whether a worker that trains out of core also tries compiled code that recomputes a part of the activations:
    with `auto`, on a CPU and where it has a C++ compiler. The compiled code is taken where it is quickest within the
    budget. Its bits are others, so those of the run then depend on its workers' compilers and trials; by default they
    do not."""
    scratch: str | None = None
    """A directory of each worker's local disk to swap to; /var/tmp when null."""


class PreemptionSettings(StrictSettings):
    """Handling of a subnet whose node is reclaimed."""

    policy: Literal["reissue", "salvage", "rolling"] = "reissue"
    """`reissue`: every subnet takes all its steps, and the result has the same bits whatever happens. `salvage`: a
    round closes with the steps that are done. `rolling`: no worker waits for another; a subnet is committed when it is
    done, and its worker gets neurons that nobody holds."""
    progress_every: Seconds = 5.0
    """Time between two progress checkpoints: a subnet's state between two steps, from which another worker can
    continue."""
    lease: Annotated[Seconds, Field(ge=3.0)] = 10.0  # below it, noise would delay its ten heartbeats too much
    """Silence after which a subnet is leased to another worker: ten heartbeats, because workers of a busy machine can
    be silent for seconds; a process that dies is noticed at once by other means."""


class CheckpointSettings(StrictSettings):
    """Place of durable state, interval of writing the whole network, and number of snapshots kept."""

    to: Place = "runs/"
    """The directory that holds run directories; for a run in a cloud, an `s3://` prefix."""
    every: Seconds = 60.0
    """Time between two snapshots of the whole network."""
    keep: Count = 2
    """Snapshots to keep."""


class Job(StrictSettings):
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
    workdir: Place | None = None
    """A directory whose files travel to a cloud's machines and are on their Python path."""

    @property
    def run_dir(self) -> Path:
        """The directory of this job's run, with all of its durable state."""
        return Path(self.checkpoint.to) / self.name

    def as_tree(self) -> dict[str, Any]:
        """Return the job as plain values for `parse_job`, with defaults except for settings that it leaves open."""
        given = self.training.model_fields_set
        left_out = {name for name in OPEN_SETTINGS if name not in given}
        left_out |= {"epochs"} if self.training.epochs is None else {"rounds"}
        return self.model_dump(mode="json", exclude={"training": left_out})
