"""SIGTERM and Ctrl-C as data: a run saves before it ends."""

import contextlib
import signal
from collections.abc import Iterator


class Interrupted(Exception):
  """SIGTERM or SIGINT arrived; the state is that of the last finished step."""


class StopSignal:
  """Turns SIGTERM (and a first Ctrl-C) into a flag, so that a run saves before it ends.

  Belongs to the main thread. `restore` gives the signals back to whoever had them.
  """

  def __init__(self):
    self.number = 0
    self._at_once = False
    self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}

  def _receive(self, number, frame):
    if self.number == signal.SIGINT == number:
      raise KeyboardInterrupt
    self.number = number
    if self._at_once:
      self.check()

  def check(self) -> None:
    if self.number:
      raise Interrupted(signal.Signals(self.number).name)

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """Within it a signal raises where it arrives: for long waits that change nothing, such as for an analyzer."""
    self._at_once = True
    try:
      self.check()
      yield
    finally:
      self._at_once = False

  def restore(self) -> None:
    """Gives the signals back."""
    for number, handler in self._before.items():
      signal.signal(number, handler)
