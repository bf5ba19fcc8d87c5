"""SIGTERM and Ctrl-C as data: a run saves before it ends."""

import signal


class Interrupted(Exception):
  """SIGTERM or SIGINT arrived; the state is that of the last finished step."""


class StopSignal:
  """Turns SIGTERM (and a first Ctrl-C) into a flag, so that a run saves before it ends."""

  def __init__(self):
    self.number = 0
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._receive)

  def _receive(self, number, frame):
    if self.number == signal.SIGINT == number:
      raise KeyboardInterrupt
    self.number = number

  def check(self) -> None:
    if self.number:
      raise Interrupted(signal.Signals(self.number).name)
