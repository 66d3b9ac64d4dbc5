"""An event file of TensorBoard, written without a thread: a full disk is an error where an event is added, and ends
the run in one line. The writers of torch and TensorBoard have a thread, which prints a traceback first."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from uuid import uuid4

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_VERSION = "brain.Event:2"  # of the format


class EventFile:
    """Each event is in the file when it has been added, so that an open TensorBoard shows it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{uuid4().hex[:8]}"
        self._file = (folder / name).open("xb", buffering=0)
        self._records = RecordWriter(self)
        self.add_event(Event(file_version=_VERSION))

    def write(self, record: bytes) -> None:
        """Write a record of TensorBoard's. An almost full disk may accept only a part of it: readers stop there."""
        while record:
            record = record[self._file.write(record) :]

    def add_event(self, event: Event, step: int | None = None, when: float | None = None) -> None:
        event.wall_time = time.time() if when is None else when
        if step is not None:
            event.step = step
        self._records.write(event.SerializeToString())

    def add_summary(self, summary: Summary, step: int | None = None, when: float | None = None) -> None:
        self.add_event(Event(summary=summary), step, when)

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
