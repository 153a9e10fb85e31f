"""An attempt that takes every step together with those at all other subnets: shards of labels under one softmax
(Distributed SLIDE, arXiv 2201.12667).

Every member has the same batch and the same hidden layers. A step exchanges, for each sample, the logarithm of each
shard's sum of exponentials, and the gradient of the hidden vector, summed in the members' order: the same bits for all,
so that hidden layers stay the same without being sent.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import torch
from torch import Tensor

from idletrain.errors import RunError
from idletrain.exchange.messages import DONE_REPLIES, LockstepGroup, Reply, checksum
from idletrain.exchange.peers import OPERATION, CutOffError, PeerLinks
from idletrain.nn.ist.subnets import Subnet, views
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.wide import label_shards
from idletrain.nn.wide.layers import SparseLinear
from idletrain.worker.attempt import COMPUTE_WAIT_POLL_SECONDS, Attempt, Loaded, all_slots

logger = logging.getLogger(__name__)
CHECKPOINTS_KEPT = 2  # here: the latest may not have reached the head for all members; older ones can be had from there


class JointExchange:
    """What a shard's layer asks of the others (`idletrain.nn.wide.layers.JointSoftmax`), and their agreement on marks.

    Args:
        link: To the others.
        call: Runs a coroutine on the event loop.

    Attributes:
        wish: Whether this member wants a mark after this step, and whether it cannot make one.
        marked: Whether all make one.
        exchanges: Denominators that were asked for.
    """

    def __init__(self, link: PeerLinks, call: Callable[[Coroutine[Any, Any, list[bytes]]], list[bytes]]) -> None:
        self._link, self._call = link, call
        self.wish, self.marked, self.exchanges = (False, False), False, 0

    def logsumexp(self, own_B: Tensor) -> Tensor:
        """See `Together`."""
        letter = torch.cat([own_B.detach(), torch.tensor(self.wish, dtype=torch.float32)])
        all_KB = torch.stack([_read(content) for content in self._swap([letter] * self._link.members)])
        self.exchanges += 1
        wanted, unable = all_KB[:, -2:].any(0).tolist()
        self.marked = wanted and not unable
        return all_KB[:, :-2].logsumexp(0)

    def sum(self, own_BH: Tensor) -> Tensor:
        """See `Together`: each member adds up a block of rows, and sends the sum to all."""
        blocks = own_BH.tensor_split(self._link.members)
        parts = [_read(content) for content in self._swap(blocks)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        sums = self._swap([total] * self._link.members)
        return torch.cat([_read(content) for content in sums]).view_as(own_BH)

    def agree(self, shared: Iterable[Tensor]) -> None:
        """Compare what every member should have.

        Raises:
            RunError: somebody has something else.
        """
        digest = checksum(values.numpy().data.cast("B") for values in shared).to_bytes(8, "big")
        if len(set(self._call(self._link.swap([digest] * self._link.members)))) > 1:
            raise RunError(
                "training.mode: lockstep: hidden layers came out different on its workers, whose machines compute "
                "other bits; take machines of one kind (the cohort in their worker_joined records)"
            )

    def _swap(self, messages: Any) -> list[bytes]:
        return self._call(self._link.swap([letter.contiguous().numpy().tobytes() for letter in messages]))


def _read(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32) if content else torch.empty(0)


class LockstepAttempt(Attempt):
    """An attempt of which no step is its own."""

    _reply: Reply | None = None  # to the push of all steps
    _agreed = False  # on what these came to
    _why = ""  # the last gang was cut off, where it is not that a member left

    def _train(self, loaded: Loaded, subnet: Subnet) -> None:
        program, lease = loaded.program, self._lease_spec.lease
        self._worker.handlers.setdefault(OPERATION, self._node.mailbox.put)
        self._flat = all_slots(self._flat, program.buffer_size(subnet, persistent=False))
        work = LocalSteps(program, subnet, self._flat, 0, lease.round)  # 0: hidden layers draw the same numbers
        order = self._open_shard(loaded, work, subnet)
        self._checkpoints = {self.steps: self._flat.clone()} if self.steps else {}
        while gang := self._form():
            self._roll_back(gang.step)
            self._why = ""
            try:
                self._take_steps(loaded, work, order, gang, subnet)
            except CutOffError as error:
                self._why = str(error)
                logger.info("subnet %d was cut off after step %d: %s", lease.subnet, self.steps, error or "a peer left")
            if self._agreed and self._reply is None:
                with self._transferring("push"):
                    self._reply = super()._push(loaded, subnet, whole=True)
        self._count_draws(work)
        if self._reply in DONE_REPLIES:  # by now the lease may be over because the round is
            self._revoked.clear()

    def _form(self) -> LockstepGroup | None:
        """Wait for all others; None when there is nothing left to do.

        A mark that is still on its way gets home first: behind the gang's start it would count as of this gang.
        """
        while self._node.moving.locked() and not self._is_unwanted():
            self._revoked.wait(COMPUTE_WAIT_POLL_SECONDS)
        if self._is_unwanted():
            return None
        mine = self._lease_spec.lease, self._worker.address, [self.steps, *self._checkpoints], self._why
        with self._timed("wait_seconds"):
            asked = self._start(self._run.client.join(*mine))
            while not self._is_unwanted():
                with contextlib.suppress(TimeoutError):
                    answer = asked.result(timeout=COMPUTE_WAIT_POLL_SECONDS)
                    break
            else:
                asked.cancel()
                return None
        if isinstance(answer, LockstepGroup):
            return answer
        if answer not in DONE_REPLIES:
            self._revoked.set()
        return None

    def _roll_back(self, step: int) -> None:
        """To the step that all can go on from; parameters move when a step's exchange is over, and not before."""
        if step != self.steps:
            self._agreed, self._reply = False, None
            if step in self._checkpoints:
                self._flat.copy_(self._checkpoints[step])
            else:
                self._checkpoints.clear()  # room for what comes
                _, pulled = self._call(self._run.client.pull(self._lease_spec.lease, at=step))
                self._flat.copy_(all_slots(pulled, len(self._flat)))
            self.steps = step

    def _take_steps(
        self, loaded: Loaded, work: LocalSteps, order: BatchOrder, group: LockstepGroup, subnet: Subnet
    ) -> None:
        """All steps that are left, unless a member is lost or this one leaves."""
        lease, node = self._lease_spec.lease, self._node
        to = (f"{self._lease_spec.store} {lease.run}", lease.epoch, lease.round, group.number)
        security = self._worker.security.get_connection_args("worker")
        opening = PeerLinks.open(
            node.mailbox, to, lease.subnet, group.members, self._lease_spec.lease_seconds, security
        )
        link = self._call(opening)
        together = JointExchange(link, self._call)
        found = label_shards.wide_output(work.module)
        assert found
        layer: SparseLinear = found[1]
        layer.together = together
        all_steps = loaded.program.training.local_steps
        marked = time.perf_counter()
        try:
            while self.steps < all_steps and not self._revoked.is_set():
                began = time.perf_counter()
                due = began - marked > self._lease_spec.progress_seconds
                leaving = node.draining.is_set()
                together.wish = due or leaving or node.checkpoint_now.is_set(), node.moving.locked()
                self._losses.append(work.step(loaded.samples, order, self.steps))
                self.steps += 1
                if together.exchanges != self.steps - group.step:
                    raise RuntimeError("training.loss: lockstep needs one that calls outputs.loss(labels), once a step")
                self.account["train_seconds"] += time.perf_counter() - began
                if together.marked and self.steps < all_steps:
                    self._keep_checkpoint(send=not leaving)
                    marked = time.perf_counter()
                    if leaving:
                        return
            if self.steps == all_steps:
                values = views(self._flat[: subnet.parameters], subnet.shapes)
                together.agree(v for v, at in zip(values, subnet.positions, strict=True) if all(p is None for p in at))
                self._agreed = True
        finally:
            layer.together = None
            self.account["peer_bytes"] = self.account.get("peer_bytes", 0) + link.sent_bytes
            self._call(link.close())

    def _keep_checkpoint(self, *, send: bool) -> None:
        """Keep the state as it is, and send it home if nothing else is on its way."""
        for oldest in sorted(self._checkpoints)[: 1 - CHECKPOINTS_KEPT]:
            del self._checkpoints[oldest]
        self._checkpoints[self.steps] = self._flat.clone()
        if send:
            mark, seconds = self._checkpoints[self.steps], self.account["train_seconds"]
            if self._send_in_background(lambda: self._send(mark, seconds, update=False)):
                self._node.checkpoint_now.clear()

    def _push(self, loaded: Loaded, subnet: Subnet, *, whole: bool) -> Reply:
        if whole and self._reply:
            return self._reply
        if self.steps not in self._checkpoints:  # a state that the others do not have
            return Reply.DUPLICATE
        return super()._push(loaded, subnet, whole=whole)
