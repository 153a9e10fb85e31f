"""List the providers by name: the package's own here, others by the entry-point group `idletrain.providers`.

A provider is a class that takes a `LaunchRequest`. It is imported when it is asked for, so that the command line
starts quickly.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import cast

from idletrain.errors import JobError
from idletrain.providers.protocol import CloudProvider, LaunchRequest, Provider, WorkerProvider

ENTRY_POINT_GROUP = "idletrain.providers"
BUILT_IN = {
    "local": "idletrain.providers.local:LocalProcesses",
    "scheduler": "idletrain.providers.scheduler:ExistingScheduler",
    "sandbox": "idletrain.cloud.sandbox.provider:SandboxProvider",
    "aws": "idletrain.cloud.aws.provider:AwsProvider",
}


def provider_named(name: str, request: LaunchRequest) -> Provider:
    """Return the provider of that name.

    Raises:
        JobError: there is none, or it implements neither protocol.
    """
    point = _built_in(name) or _installed(name)
    provider = point.load()(request)
    if not isinstance(provider, WorkerProvider | CloudProvider):
        raise JobError(f"--cloud: {point.value} is neither a WorkerProvider nor a CloudProvider; update it")
    return cast("Provider", provider)


def _built_in(name: str) -> EntryPoint | None:
    return EntryPoint(name, BUILT_IN[name], ENTRY_POINT_GROUP) if name in BUILT_IN else None


def _installed(name: str) -> EntryPoint:
    """Look for a provider in all installed distributions, which takes some hundredths of a second.

    Raises:
        JobError: there is none of that name.
    """
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        there = ", ".join(sorted({*installed, *BUILT_IN}))
        raise JobError(f"--cloud: there is no provider {name}; there are: {there}")
    return installed[name]


def cloud_named(name: str, request: LaunchRequest | None = None) -> CloudProvider:
    """Return the provider of that name, which must have machines of its own.

    Raises:
        JobError: there is none, or runs on it have their head on the launching machine.
    """
    provider = provider_named(name, request or LaunchRequest())
    if not isinstance(provider, CloudProvider):
        raise JobError(f"--cloud: runs on {name} have their head on the machine that launched them; leave it out")
    return provider
