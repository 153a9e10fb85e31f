"""A run whose events a test chooses, and that checks each command."""

from __future__ import annotations

from idletrain.exchange.messages import LeaseId, Reply
from idletrain.rounds import state
from idletrain.rounds.protocol import (
    AttemptEnded,
    ClockTick,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Finish,
    GrantLease,
    Heartbeat,
    KeepScore,
    LeaseLost,
    PartArrived,
    Persist,
    Persisted,
    Pushed,
    Respond,
    RoundEvent,
    ScoreKept,
    WorkerJoined,
)
from idletrain.rounds.state import advance
from idletrain.rounds.table import Phase, RoundRules, RoundState, RunStage, SubnetTable
from idletrain.rounds.worker_table import WorkerState, WorkerTable

STEPS = 4
SMALL, LARGE = 10, 100


class World:
    """A run whose events a test chooses; carries out commands only as the test says, and checks each of them."""

    def __init__(self, **rules: object) -> None:
        settings_ = {"salvage": False, "local_steps": STEPS, "rounds": 3, "lease_seconds": 10.0, "evaluate_every": 2}
        needs = rules.pop("needs", (SMALL, LARGE, SMALL))
        staged, round_ = rules.pop("staged", {}), rules.pop("round_", 0)
        self.needs, self.exclusive = needs, rules.pop("exclusive", frozenset())
        self.later_needs: dict[int, tuple[int, ...]] = rules.pop("later_needs", {})  # of rounds that begin a phase
        self.now = 0.0
        workers = {name: WorkerState(memory_bytes=LARGE, leases=2) for name in rules.pop("workers", ())}
        rules_ = RoundRules(**(settings_ | rules))
        self.state = state.open_run(rules_, "run", 1, round_, needs, staged, self.now, workers, self.exclusive)
        self.leases: list[GrantLease] = []
        self.running: list[GrantLease] = []  # attempts whose tasks have not ended
        self.to_store: list[int] = []
        self.stored: dict[tuple[int, int], int] = {}
        self.committed: list[Commit] = []
        self.commit_due = self.evaluation_due = self.score_due = False
        self.lost: list[LeaseLost] = []
        self.kept: list[tuple[int, float | None, bool]] = []
        self.finished: str | None = None
        self.log: list[state.Command] = []

    def do(self, kind: type[RoundEvent], **fields: object) -> tuple[state.Command, ...]:
        if kind is Pushed:  # of fewer steps than all, a checkpoint, unless the test says otherwise
            fields.setdefault("update", fields["steps"] == STEPS)
        event = kind(now=self.now, **fields)
        before = self.state
        self.state, commands = advance(before, event)
        answers = [c for c in commands if isinstance(c, Respond)]
        assert len(answers) == isinstance(event, Heartbeat | Pushed | PartArrived)
        for command in commands:
            self._check(command)
        self._check_state(before)
        self.log += commands
        return commands

    def send(self, kind: type[RoundEvent], lease: LeaseId, **fields: object) -> Reply:
        (answer,) = [c for c in self.do(kind, lease=lease, **fields) if isinstance(c, Respond)]
        return answer.reply

    def join(self, *names: str, memory_bytes: int = LARGE, leases: int = 1, cohort: str = "") -> None:
        for name in names:
            self.do(WorkerJoined, worker=name, memory_bytes=memory_bytes, leases=leases, cohort=cohort)

    def lease_of(self, subnet: int) -> LeaseId:
        return next(c.lease for c in reversed(self.leases) if c.lease.subnet == subnet)

    def finish_subnet(self, subnet: int) -> None:
        assert self.send(Pushed, self.lease_of(subnet), steps=STEPS) is Reply.ACCEPTED
        self.store(subnet)
        self.end(self.lease_of(subnet))

    def store(self, subnet: int) -> None:
        self.to_store.remove(subnet)
        rules, stored = self.state.rules, self.stored[self.state.subnets[subnet].round, subnet]
        of_lane = rules.lane_neurons[subnet] if rules.rolling else 0
        self.do(Persisted, subnet=subnet, neuron_steps=self.state.neuron_steps + of_lane * stored)

    def end(self, lease: LeaseId, *, failed: bool = False, out_of_memory: bool = False) -> None:
        self.running = [c for c in self.running if c.lease != lease]
        (worker,) = (c.worker for c in self.leases if c.lease == lease)
        self.do(AttemptEnded, lease=lease, worker=worker, failed=failed, out_of_memory=out_of_memory)

    def commit(self, *, snapshot_due: bool = False) -> None:
        self.commit_due = False
        begun = self.later_needs.get(self.state.round + 1)
        self.needs, steps = begun or self.needs, STEPS if begun else None
        exclusive = frozenset(k for k in self.exclusive if k < len(self.needs))
        self.do(Committed, needs=self.needs, exclusive=exclusive, snapshot_due=snapshot_due, new_local_steps=steps)

    def evaluate(self, accuracy: float | None = None, score: float | None = None) -> None:
        """Report an evaluation, or that a snapshot alone is written; a score that is due is kept."""
        self.evaluation_due = False
        measured = next((c.evaluate and c.waits for c in reversed(self.log) if isinstance(c, Evaluate)), True)
        self.do(Evaluated, accuracy=accuracy, score=score, measured=measured)
        if self.score_due:
            self.keep_score()

    def keep_score(self) -> None:
        self.score_due = False
        self.do(ScoreKept)

    def drive(self) -> None:
        """A fair world: new workers come, each lease is finished, every command is carried out."""
        for turn in range(200):
            if self.finished:
                return
            self.now += 1
            self.join(*(f"fresh{turn}-{i}" for i in range(2)))
            for k in list(self.to_store):
                self.store(k)
            if self.commit_due:
                self.commit()
            if self.evaluation_due:
                self.evaluate()
            for granted in list(self.running):
                self.send(Pushed, granted.lease, steps=STEPS)
                self.end(granted.lease)
            self.do(ClockTick)
        raise AssertionError(f"stuck in {self.state}")

    def _check(self, command: state.Command) -> None:
        rules = self.state.rules
        match command:
            case GrantLease(lease, _, step):
                assert lease.attempt not in {c.lease.attempt for c in self.leases}
                assert step < rules.local_steps or rules.lockstep
                self.leases.append(command)
                self.running.append(command)
            case Persist(k, _, steps, norm_fraction):
                key = (self.state.subnets[k].round, k)
                assert not norm_fraction or rules.salvage
                assert key not in self.stored, "accepted twice"
                assert steps == rules.local_steps or rules.salvage or rules.rolling
                assert 0 < steps <= rules.local_steps
                self.stored[key] = steps
                self.to_store.append(k)
            case Commit(round_, staged):
                assert round_ not in {c.round for c in self.committed}
                assert bool(staged) != rules.rolling
                assert self.state.evaluating == rules.rolling
                assert rules.salvage or rules.rolling or len(staged) == len(self.needs)
                assert rules.salvage or all(steps == rules.local_steps for _, steps in staged)
                self.committed.append(command)
                self.commit_due = True
            case Evaluate():
                assert not self.evaluation_due
                self.evaluation_due = True
            case KeepScore():
                assert self.state.evaluating
                assert not self.score_due
                self.score_due = True
                self.kept.append((self.state.round, command.score, command.best))
            case LeaseLost():
                assert command.kept_steps >= 0
                assert command.lost_steps >= 0
                self.lost.append(command)
            case Finish(status):
                assert self.finished is None
                self.finished = status

    def _check_state(self, before: RoundState) -> None:
        now = self.state
        if now.round == before.round:
            for old, new in zip(before.subnets, now.subnets, strict=True):
                assert (new.round, new.steps) >= (old.round, old.steps), "stored steps are gone"
        assert now.subnets == SubnetTable.of(now.subnets)
        anew = WorkerTable.of(now.workers)
        assert now.workers == anew
        assert (now.workers.idle, now.workers.roomy, now.workers.queueing) == (anew.idle, anew.roomy, anew.queueing)
        if now.stage is RunStage.DONE:
            return
        assert all(s.phase is Phase.LEASED for s in now.subnets if s.lease.queued)
        assert all(s.phase is Phase.LEASED and not now.rules.salvage for s in now.subnets if s.backup)
        assert all(s.backup.worker != s.lease.worker for s in now.subnets if s.backup)
        for name, worker in now.workers.items():
            held = [s for s in now.subnets for lease in s.leases if lease.worker == name]
            leases = [lease for s in now.subnets for lease in s.leases if lease.worker == name]
            assert {lease.attempt for lease in leases} | worker.unwanted.keys() <= worker.attempts.keys()
            assert not {lease.attempt for lease in leases} & worker.unwanted.keys()
            assert len(worker.attempts) <= worker.leases
            assert sum(s.need_bytes for s in held) <= worker.memory_bytes
            assert len(held) == 1 or not any(s.exclusive for s in held)
            assert len(held) <= 1 or not now.rules.lockstep
            first = next(iter(worker.attempts), None)
            assert all(lease.attempt != first for lease in leases if lease.queued), "it trains what it is to train next"
