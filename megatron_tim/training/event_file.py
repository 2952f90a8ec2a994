"""TensorBoard scalars, written as they come.

TensorBoard's own SummaryWriter writes from a thread, which prints a traceback when the disk is full and
loses the last rows on a kill. A step has one small record, so it is written here at once, in the
format and with the classes of the tensorboard package.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tim.errors import UserError
from megatron_tim.training.files import append_whole

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


class EventFile:
    """A new event file in ``folder``; TensorBoard hides what older files hold from step ``first_step`` on.

    Raises:
        UserError: tensorboard is not installed, or the file cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        except ImportError:
            raise UserError("run.tensorboard is on but tensorboard is not installed; install it or set run.tensorboard=false.") from None
        now = time.time()
        self._path = folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        start = Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START))
        append_whole(self._path, _records(Event(wall_time=now, file_version="brain.Event:2"), start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends the scalars of ``step``.

        Raises:
            UserError: the disk is full or the file may not be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        append_whole(self._path, _records(Event(wall_time=time.time(), step=step, summary=Summary(value=values))))


def _records(*events: Event) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    for event in events:
        RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
