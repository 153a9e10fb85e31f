"""A lease that the head sends to a worker is small."""

from __future__ import annotations

import pickle

import cloudpickle

from idletrain.exchange.messages import LeaseId
from idletrain.nn.ist.schemes import NeuronScheme, SubnetPlace, by_neurons
from idletrain.worker.lease_spec import LeaseSpec

NOWHERE = SubnetPlace(())


def spec(lease: LeaseId, own: SubnetPlace = NOWHERE) -> LeaseSpec:
    return LeaseSpec(lease, "tls://[2001:db8:85a3::8a2e:370:7334]:65535", own, "in-core", 5.0, 10.0)


def test_a_lease_of_one_of_a_thousand_subnets_pickles_in_under_1_kb() -> None:
    lease = LeaseId("a" * 63, 10**6, 10**6, 999, 10**9)
    own = NeuronScheme().places([4096, 4096], by_neurons([1 / 1000] * 1000))[999]
    lease_spec = spec(lease, own)
    assert len(cloudpickle.dumps(lease_spec)) < 1024
    assert pickle.loads(pickle.dumps(lease_spec)) == lease_spec


def test_a_checkpoint_is_due_from_time_to_time_if_it_arrives_before_the_end() -> None:
    wants = spec(LeaseId("a", 0, 0, 0, 0)).wants_checkpoint
    assert wants(5.1, 10.0, 3.0)
    assert not wants(4.9, 10.0, 3.0)
    assert not wants(5.1, 2.9, 3.0)
    assert not wants(5.1, 0.0, 0.0)
