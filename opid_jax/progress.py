"""How far a run is: a bar on a terminal, a line every few seconds in a log."""

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
  """Shows training steps, episodes, success so far and the time left; a context manager.

  Call `episode` as each one ends and `step` as each training step ends. On a terminal a bar is redrawn;
  anywhere else a plain line is written at most every `interval` seconds, so a log shows life and stays short.
  """

  def __init__(
    self,
    label: str,
    episodes_per_step: int,
    *,
    num_steps: int = 1,
    done: int = 0,
    stream: TextIO | None = None,
    interval: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock.

    Args:
      label: in front of everything, for example `'train'`.
      episodes_per_step: episodes of one training step.
      num_steps: training steps of the run; 1 for an evaluation.
      done: training steps that were finished before (a resumed run).
      stream: where to write; None = standard error.
      interval: seconds between two lines where no bar can be shown.
      clock: returns seconds; tests hand in their own.
    """
    self._label, self._num_steps, self._per_step, self._first = label, num_steps, episodes_per_step, done
    self._stream = stream or sys.stderr
    self._interval, self._clock = interval, clock
    self._started = self._last_line = clock()
    self._steps, self._in_step, self._episodes, self._successes = done, 0, 0, 0
    self._doing, self._shown = '', ''
    self._bar = None
    if self._stream.isatty():
      from tqdm import tqdm

      total = num_steps * episodes_per_step
      self._bar = tqdm(total=total, file=self._stream, bar_format='{desc} |{bar:20}|', dynamic_ncols=True)
      self._draw()

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()

  def episode(self, success: bool) -> None:
    """One more episode of the current training step has ended."""
    self._in_step = min(self._in_step + 1, self._per_step)
    self._episodes += 1
    self._successes += bool(success)
    self._update()

  def doing(self, what: str) -> None:
    """Names the present phase, one or two words, for example `'learning'` or `'evaluating'`."""
    self._doing = what
    self._update()

  def step(self, shown: str = '') -> None:
    """A training step has ended.

    Args:
      shown: a few words about it, for example `'reward 4.2'`.
    """
    self._steps, self._in_step, self._shown, self._doing = self._steps + 1, 0, shown, ''
    self._update(force=self._steps == self._num_steps)

  def say(self, text: str) -> None:
    """Writes a line of its own, above the bar if there is one."""
    if self._bar is not None:
      self._bar.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)
      self._last_line = self._clock()

  def close(self) -> None:
    """Leaves the last state on the screen."""
    if self._bar is not None:
      self._draw()
      self._bar.close()

  def text(self) -> str:
    """The state in one line."""
    parts = [f'step {self._steps}/{self._num_steps}'] if self._num_steps > 1 else []
    parts.append(f'episode {self._in_step}/{self._per_step}')
    if self._episodes:
      parts.append(f'success {100 * self._successes / self._episodes:.1f}% of {self._episodes}')
    parts += [text for text in (self._shown, self._doing) if text]
    return f'{self._label}: ' + ', '.join([*parts, f'{self._time_left()} left'])

  def _time_left(self) -> str:
    finished = self._steps - self._first + self._in_step / self._per_step
    if not finished:
      return '?'
    seconds = round((self._clock() - self._started) / finished * (self._num_steps - self._first - finished))
    minutes, seconds = divmod(max(seconds, 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'

  def _update(self, force: bool = False) -> None:
    if self._bar is not None:
      self._draw()
    elif force or self._clock() - self._last_line >= self._interval:
      self.say(self.text())

  def _draw(self) -> None:
    self._bar.n = min(self._steps * self._per_step + self._in_step, self._bar.total)
    self._bar.set_description_str(self.text(), refresh=False)
    self._bar.refresh()
