"""Say how often a region's spot machines are taken back, by AWS' public file behind its Spot Instance Advisor.

For each instance type it has a range: the share of such machines that were interrupted in the last month
(https://aws.amazon.com/ec2/spot/instance-advisor/). No API of AWS has this figure.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from idletrain.cloud.aws.pricing import PriceCache

logger = logging.getLogger(__name__)
URL = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
TIMEOUT_SECONDS = 10.0
LONGEST_BYTES = 64 << 20  # it has about 2 MB
FRESH_SECONDS = 86400.0  # AWS updates it daily
SHARES = TypeAdapter(dict[str, float])
MOST_SHARE = 0.5  # of the highest range, which is open ("more than 20 %")


def shares(ec2: Any, cache: PriceCache, url: str = URL) -> dict[str, float]:
    """Return the share of each type's spot machines that AWS takes back in a month; nothing where that cannot be known.

    Args:
        ec2: An EC2 client of the region; another cloud that answers as AWS does has no such file.
        cache: Keeps it for a day.
        url: Where the file is.
    """
    if not ec2.meta.endpoint_url.endswith(".amazonaws.com"):
        return {}
    region = ec2.meta.region_name
    return cache.get(ec2, f"advisor-{region}", SHARES, FRESH_SECONDS, lambda: _fetch(region, url))


def _fetch(region: str, url: str) -> dict[str, float]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 (a constant)
            return interruption_shares(answer.read(LONGEST_BYTES), region)
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s)", url, error)
        return {}


def interruption_shares(content: bytes, region: str) -> dict[str, float]:
    """Return the upper end of each type's range, from 0 to 1.

    Raises:
        ValueError: it is another file.
    """
    try:
        tree = json.loads(content)
        ends = {int(item["index"]): float(item["max"]) / 100 for item in tree["ranges"]}
        types: Mapping[str, Any] = tree["spot_advisor"].get(region, {}).get("Linux", {})
        shares = {str(name): ends[int(item["r"])] for name, item in types.items()}
    except (AttributeError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not the advisor's file: {error!r}") from None
    return {name: min(share, MOST_SHARE) for name, share in shares.items() if share > 0}
