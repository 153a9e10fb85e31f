"""A slow cluster on one machine: network namespaces, shaped links, limited CPUs and memory."""

from idletrain_testbed.network import Counters
from idletrain_testbed.rights import missing
from idletrain_testbed.settings import TestbedError
from idletrain_testbed.testbed import Testbed

__all__ = ["Counters", "Testbed", "TestbedError", "missing"]
