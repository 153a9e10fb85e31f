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
from idletrain.worker.attempt import Attempt, all_slots
from idletrain.worker.node import Loaded
from idletrain.worker.transfers import WAIT_POLL_SECONDS

logger = logging.getLogger(__name__)
CHECKPOINTS_KEPT = 2  # here: the latest may not have reached the head for all members, which has older ones


class JointExchange:
    """Implement `JointSoftmax` (`idletrain.nn.wide.layers`) over links to the other shards, and agree on checkpoints.

    Args:
        link: To the others.
        call: Runs a coroutine on the event loop.

    Attributes:
        checkpoint_vote: Whether this member wants a checkpoint after this step, and whether it cannot make one.
        checkpoint_agreed: Whether all make one.
        exchanges: How many times `logsumexp` was called.
    """

    def __init__(self, link: PeerLinks, call: Callable[[Coroutine[Any, Any, list[bytes]]], list[bytes]]) -> None:
        self._link, self._call = link, call
        self.checkpoint_vote, self.checkpoint_agreed, self.exchanges = (False, False), False, 0

    def logsumexp(self, own_B: Tensor) -> Tensor:
        """Return the log of the sum of all shards' exponentials `[B]`; the votes on a checkpoint go along."""
        message = torch.cat([own_B.detach(), torch.tensor(self.checkpoint_vote, dtype=torch.float32)])
        all_KB = torch.stack([_read(content) for content in self._swap([message] * self._link.members)])
        self.exchanges += 1
        wanted, unable = all_KB[:, -2:].any(0).tolist()
        self.checkpoint_agreed = wanted and not unable
        return all_KB[:, :-2].logsumexp(0)

    def sum(self, own_BH: Tensor) -> Tensor:
        """Return the sum of all shards' tensors `[B, H]`: each member adds up a block of rows and sends it to all."""
        blocks = own_BH.tensor_split(self._link.members)
        parts = [_read(content) for content in self._swap(blocks)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        sums = self._swap([total] * self._link.members)
        return torch.cat([_read(content) for content in sums]).view_as(own_BH)

    def agree(self, shared: Iterable[Tensor]) -> None:
        """Compare values that every member should have.

        Raises:
            RunError: they differ between two members.
        """
        digest = checksum(values.numpy().data.cast("B") for values in shared).to_bytes(8, "big")
        if len(set(self._call(self._link.swap([digest] * self._link.members)))) > 1:
            raise RunError(
                "training.mode: lockstep: hidden layers came out different on its workers, whose machines compute "
                "other bits; take machines of one kind (the cohort in their worker_joined records)"
            )

    def _swap(self, messages: Any) -> list[bytes]:
        return self._call(self._link.swap([message.contiguous().numpy().tobytes() for message in messages]))


def _read(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.float32) if content else torch.empty(0)


class LockstepAttempt(Attempt):
    """An attempt that takes every step together with the attempts at all other subnets."""

    _reply: Reply | None = None  # to the push of all steps
    _agreed = False  # whether all members' hidden layers are the same after the last step
    _why = ""  # the last group was cut off, except where a member left

    def _train(self, loaded: Loaded, subnet: Subnet) -> None:
        program, lease = loaded.program, self._spec.lease
        self._worker.handlers.setdefault(OPERATION, self._node.mailbox.put)
        self._flat = all_slots(self._flat, program.buffer_size(subnet, persistent=False))
        work = LocalSteps(program, subnet, self._flat, 0, lease.round)  # 0: hidden layers draw the same numbers
        order = self._open_shard(loaded, work, subnet)
        self._checkpoints = {self.steps: self._flat.clone()} if self.steps else {}
        while group := self._join():
            self._roll_back(group.step)
            self._why = ""
            try:
                self._train_in_group(loaded, work, order, group, subnet)
            except CutOffError as error:
                self._why = str(error)
                logger.info("subnet %d was cut off after step %d: %s", lease.subnet, self.steps, error or "a peer left")
            if self._agreed and self._reply is None:
                size = 4 * loaded.program.buffer_size(subnet, persistent=True)
                with self._transfers.transferring("push", size):
                    self._reply = super()._push(loaded, subnet, whole=True)
        self._count_draws(work)
        if self._reply in DONE_REPLIES:  # by now the lease may be over because the round is
            self._transfers.revoked.clear()

    def _join(self) -> LockstepGroup | None:
        """Wait for all other members and return the group; None when there is nothing left to do.

        A checkpoint under way is sent first: after the group's start it would count as one of this group.
        """
        transfers = self._transfers
        while self._node.moving.locked() and not transfers.is_unwanted():
            transfers.revoked.wait(WAIT_POLL_SECONDS)
        if transfers.is_unwanted():
            return None
        with transfers.timed("wait_seconds"):
            steps = [self.steps, *self._checkpoints]
            request = transfers.start(self._run.client.join(self._spec.lease, self._worker.address, steps, self._why))
            while not transfers.is_unwanted():
                with contextlib.suppress(TimeoutError):
                    answer = request.result(timeout=WAIT_POLL_SECONDS)
                    break
            else:
                request.cancel()
                return None
        if isinstance(answer, LockstepGroup):
            return answer
        if answer not in DONE_REPLIES:
            transfers.revoked.set()
        return None

    def _roll_back(self, step: int) -> None:
        """Go back to the step that all members can resume from; a step moves parameters only after its exchange."""
        if step != self.steps:
            self._agreed, self._reply = False, None
            if step in self._checkpoints:
                self._flat.copy_(self._checkpoints[step])
            else:
                self._checkpoints.clear()  # room for the pulled state
                _, pulled = self._transfers.call(self._run.client.pull(self._spec.lease, at=step))
                self._flat.copy_(all_slots(pulled, len(self._flat)))
            self.steps = step

    def _train_in_group(
        self, loaded: Loaded, work: LocalSteps, order: BatchOrder, group: LockstepGroup, subnet: Subnet
    ) -> None:
        """Do the remaining steps, unless a member is lost or this one leaves; then compare the hidden layers."""
        link = self._transfers.call(self._open_links(group))
        exchange = JointExchange(link, self._call_peers)
        output = label_shards.wide_output(work.module)
        assert output
        layer: SparseLinear = output[1]
        layer.together = exchange
        try:
            self._train_with(exchange, loaded, work, order, group.step)
            if self.steps == loaded.program.local_steps(self._spec.lease.round):
                values = views(self._flat[: subnet.parameters], subnet.shapes)
                exchange.agree(v for v, at in zip(values, subnet.positions, strict=True) if all(p is None for p in at))
                self._agreed = True
        finally:
            layer.together = None
            self.account["peer_bytes"] = self.account.get("peer_bytes", 0) + link.sent_bytes
            self._transfers.call(link.close())

    def _call_peers(self, work: Coroutine[Any, Any, list[bytes]]) -> list[bytes]:
        """Exchange with the other members; whoever waits for them does not hang."""
        self._doing = "move"
        try:
            return self._transfers.call(work)
        finally:
            self._doing = "train"

    def _open_links(self, group: LockstepGroup) -> Coroutine[Any, Any, PeerLinks]:
        lease = self._spec.lease
        topic = (f"{self._spec.store} {lease.run}", lease.epoch, lease.round, group.number)
        security = self._worker.security.get_connection_args("worker")
        return PeerLinks.open(
            self._node.mailbox, topic, lease.subnet, group.members, self._spec.lease_seconds, security
        )

    def _train_with(
        self, exchange: JointExchange, loaded: Loaded, work: LocalSteps, order: BatchOrder, initial_step: int
    ) -> None:
        """Do the remaining steps over an open exchange, keeping the checkpoints that all members agree on."""
        node, all_steps = self._node, loaded.program.local_steps(self._spec.lease.round)
        saved_at = time.perf_counter()
        while self.steps < all_steps and not self._transfers.revoked.is_set():
            self._doing = "train"
            started = time.perf_counter()
            due = started - saved_at > self._spec.progress_seconds
            leaving = node.draining.is_set()
            exchange.checkpoint_vote = due or leaving or node.checkpoint_now.is_set(), node.moving.locked()
            self._losses.append(work.step(loaded.samples, order, self.steps))
            self.steps += 1
            self._node.steps += 1
            if exchange.exchanges != self.steps - initial_step:
                raise RuntimeError("training.loss: lockstep needs one that calls outputs.loss(labels), once a step")
            self.account["train_seconds"] += time.perf_counter() - started
            self._doing = "move"
            if exchange.checkpoint_agreed and self.steps < all_steps:
                self._keep_checkpoint(send=not leaving)
                saved_at = time.perf_counter()
                if leaving:
                    return

    def _keep_checkpoint(self, *, send: bool) -> None:
        """Keep a copy of the state, and send it to the store unless another transfer is under way."""
        for oldest in sorted(self._checkpoints)[: 1 - CHECKPOINTS_KEPT]:
            del self._checkpoints[oldest]
        self._checkpoints[self.steps] = self._flat.clone()
        if send:
            state, progress = self._checkpoints[self.steps], self._progress(self.account["train_seconds"])
            if self._transfers.send_in_background(lambda: self._transfers.send(state, progress, update=False)):
                self._node.checkpoint_now.clear()

    def _push(self, loaded: Loaded, subnet: Subnet, *, whole: bool) -> Reply:
        if whole and self._reply:
            return self._reply
        if self.steps not in self._checkpoints:  # a state that the others do not have
            return Reply.DUPLICATE
        return super()._push(loaded, subnet, whole=whole)
