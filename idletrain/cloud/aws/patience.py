"""Repeat requests that AWS refuses only for a moment: throttled, unanswered, or about something made a second ago."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from idletrain.cloud.aws.errors import REQUEST_ERRORS, ErrorKind, error_kind, sentence_of
from idletrain.cloud.reconcile import pause_seconds

logger = logging.getLogger(__name__)
T = TypeVar("T")
REPEAT_SECONDS = 90.0  # EC2's lists become consistent within a minute or so, and a burst of throttling is shorter
LONGEST_AWS_PAUSE_SECONDS = 8.0
PASSING_KINDS = (ErrorKind.PASSING, ErrorKind.ABSENT)


@dataclass(frozen=True)
class Patience:
    """A limit on repeating a request that gets no answer.

    Attributes:
        report: Gets a line before each pause.
        seconds: Time for which one request is repeated.
    """

    report: Callable[[str], None] = logger.info
    seconds: float = REPEAT_SECONDS

    def request(self, send: Callable[[], T]) -> T:
        """Send a request until AWS answers it; return the answer. Sending it twice must do no harm.

        Raises:
            Exception: what the client raised last: the request is refused, or patience is at its end.
        """
        until, tries = time.monotonic() + self.seconds, 0
        while True:
            try:
                return send()
            except REQUEST_ERRORS as error:
                left = until - time.monotonic()
                if error_kind(error) not in PASSING_KINDS or left <= 0:
                    raise
                jitter = random.random()  # noqa: S311 (no secret)
                pause = min(pause_seconds(tries, jitter, LONGEST_AWS_PAUSE_SECONDS), left)
                self.report(f"waiting: {sentence_of(error)}; asked again in {pause:.0f} s")
                time.sleep(pause)
                tries += 1
