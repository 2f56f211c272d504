"""How busy this machine is, for the people who look at a run: MLflow's own names, so they get its tab of their own.

The agent writes one line every few seconds to a file beside the attempt's logs; whoever launched the attempt passes the
lines on. They are no events of the run: nothing is decided by them, and the store does not keep them.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any

import psutil

logger = logging.getLogger(__name__)

FILE_NAME = "machine.jsonl"
INTERVAL_SECONDS = 10.0
FIRST_SECONDS = 2.0
"""A short run gets a sample, too."""
KIND = "system"
MEGABYTE = 1e6


class MachineLog:
    """Appends a sample to `path` whenever `INTERVAL_SECONDS` have passed."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._due = 0.0
        self._seq = 0
        self._network = psutil.net_io_counters()
        psutil.cpu_percent()  # the first answer is about nothing

    def look(self, now: float, step: int) -> None:
        """Write a sample under `step`, the newest that a rank has told of, when it is time; `now` is monotonic."""
        if self._due == 0.0:
            self._due = now + FIRST_SECONDS
        if now < self._due:
            return
        self._due = now + INTERVAL_SECONDS
        self._seq += 1
        line = {"seq": self._seq, "time": time.time(), "attempt": self._attempt, "kind": KIND, "step": step}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, **self._sample()}) + "\n")
        except OSError as error:
            # A full disk is found by what has to be kept; an attempt does not end for this.
            logger.warning("%s cannot be written: %s", self._path, error.strerror)

    def _sample(self) -> dict[str, Any]:
        """Shares in percent, sizes in megabytes of 10^6 bytes; traffic is that since the agent started."""
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._path.parent))
        network, before = psutil.net_io_counters(), self._network
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": round(memory.used / MEGABYTE, 1),
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": round(disk.free / MEGABYTE, 1),
            "network_receive_megabytes": round((network.bytes_recv - before.bytes_recv) / MEGABYTE, 3),
            "network_transmit_megabytes": round((network.bytes_sent - before.bytes_sent) / MEGABYTE, 3),
        }
