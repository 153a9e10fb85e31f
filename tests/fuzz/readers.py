"""All readers, by name."""

from __future__ import annotations

import cloud_readers
import data_readers
import run_readers
import sandbox_readers
import wire_readers

READERS = {
    **data_readers.READERS,
    **run_readers.READERS,
    **wire_readers.READERS,
    **cloud_readers.READERS,
    **sandbox_readers.READERS,
}
