"""What an analyzer is, and the rules that all of them share: settings, counting, when a run must stop."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from opid_jax.analyzers.prompt import MIN_CHARS
from opid_jax.types import Skills, Trajectory

# Reasons that are nobody's fault: the group taught nothing, or the user's own limit was reached.
# They are counted, and do not count as failures.
NEUTRAL = ('no_contrast', 'budget')

# Below this many trajectories a share says little, so it stops nothing.
MIN_SAMPLE = 8


@dataclasses.dataclass(frozen=True)
class Settings:
  """The fields of `config.analyzer`.

  Attributes:
    name: module of this package: 'contrast', 'openai' or 'policy'.
    max_step_skills: at most so many step skills are kept for one trajectory.
    max_failure_share: above this share of failed trajectories in a training step the run stops; 1 never does.
    model: name of the endpoint's model.
    base_url: address of the endpoint; '' is OpenAI's own.
    api_key_env: environment variable that holds the key.
    concurrency: requests in flight at most.
    timeout_s: seconds one request may take.
    step_timeout_s: seconds all requests of one training step may take together.
    max_attempts: requests for one trajectory at most, the first included.
    max_reply_tokens: length limit of a reply; doubled once for a reply that hit it.
    token_budget: tokens (prompt and reply) that this process may spend; 0 is no limit. Once they are spent
      nothing more is asked, and the remaining trajectories train as GRPO under the reason 'budget'. Requests
      that are in flight at that moment still complete.
    max_prompt_chars: longest prompt in characters.
    max_prompt_tokens: longest prompt in tokens that 'policy' can read; the other analyzers do not use it.
    temperature: sampling temperature of the endpoint.
  """

  name: str = 'contrast'
  max_step_skills: int = 5
  max_failure_share: float = 0.5
  model: str = ''
  base_url: str = ''
  api_key_env: str = 'OPENAI_API_KEY'
  concurrency: int = 32
  timeout_s: float = 60.0
  step_timeout_s: float = 300.0
  max_attempts: int = 3
  max_reply_tokens: int = 4096
  token_budget: int = 0
  max_prompt_chars: int = 60000
  max_prompt_tokens: int = 8192
  temperature: float = 0.4

  def __post_init__(self):
    least = {
      'max_step_skills': 0, 'max_failure_share': 0, 'concurrency': 1, 'timeout_s': 0.001,
      'step_timeout_s': 0.001, 'max_attempts': 1, 'max_reply_tokens': 1, 'token_budget': 0,
      'max_prompt_chars': MIN_CHARS, 'temperature': 0,
    }
    for field, bound in least.items():
      value = getattr(self, field)
      if not math.isfinite(value) or value < bound:
        raise ValueError(f'analyzer.{field} is {value!r}; it must be a number of at least {bound}.')
    if self.max_failure_share > 1:
      raise ValueError(f'analyzer.max_failure_share is {self.max_failure_share!r}; it must not be above 1.')


def read_settings(settings: Mapping[str, Any]) -> Settings:
  """Settings from a mapping; fields that it lacks take their defaults.

  Raises:
    ValueError: if a field is unknown or out of range.
  """
  given = {key: settings[key] for key in settings}
  known = [field.name for field in dataclasses.fields(Settings)]
  unknown = sorted(set(given) - set(known))
  if unknown:
    raise ValueError(f'Unknown analyzer settings {", ".join(unknown)}. Known: {", ".join(known)}.')
  return Settings(**given)


@dataclasses.dataclass
class Usage:
  """Cost of one trajectory: requests sent, how many of them were repeats, tokens as the endpoint counts."""

  requests: int = 0
  retries: int = 0
  tokens_in: int = 0
  tokens_out: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
  """Skills of one trajectory with what the counters need.

  Attributes:
    skills: usable skills, or a reason.
    detail: what exactly went wrong, one line, for the error message.
    dropped: step skills that were refused one by one (no such step, no text).
    usage: cost.
  """

  skills: Skills
  detail: str = ''
  dropped: int = 0
  usage: Usage = dataclasses.field(default_factory=Usage)


class Pending:
  """Work that was handed in; `result` waits for it.

  Attributes:
    counts: filled once `result` has returned or stopped the run. Trajectories: `trajectories` is `succeeded`
      plus `failed` plus those with a neutral reason; `partial` of the succeeded have step skills only.
      `dropped_steps` step skills were refused. Requests: `requests`, of which `retries`; `tokens_in`,
      `tokens_out`. And one key per reason that occurred. A `Counter`: anything else reads 0.
  """

  def __init__(self, answer: Callable[[], Sequence[Answer]], max_failure_share: float):
    """`answer`: called once, on the thread that asks for the result."""
    self._answer = answer
    self._max_failure_share = max_failure_share
    self._skills: list[Skills] | None = None
    self.counts: Counter[str] = Counter()

  def result(self) -> list[Skills]:
    """Skills in the order of the trajectories.

    Raises:
      RuntimeError: if more than the configured share failed, or the endpoint refuses every request.
    """
    if self._skills is None:
      answers = self._answer()
      self.counts = count(answers)
      refuse_many_failures(answers, self._max_failure_share)
      self._skills = [answer.skills for answer in answers]
    return self._skills


class Analyzer(Protocol):
  """Turns finished trajectories into skills."""

  def submit(self, trajectories: Sequence[Trajectory]) -> Pending:
    """Starts the analysis and returns at once. Threads are used for HTTP only."""
    ...


def is_failure(skills: Skills) -> bool:
  """Whether something went wrong; a trajectory that merely teaches nothing is no failure."""
  return not skills.usable and skills.reason not in NEUTRAL


def count(answers: Sequence[Answer]) -> Counter[str]:
  """The counters described in `Pending`."""
  counts: Counter[str] = Counter(trajectories=len(answers))
  for answer in answers:
    counts['succeeded'] += answer.skills.usable
    counts['partial'] += answer.skills.usable and not answer.skills.episode
    counts['failed'] += is_failure(answer.skills)
    counts['dropped_steps'] += answer.dropped
    for key, value in dataclasses.asdict(answer.usage).items():
      counts[key] += value
    if answer.skills.reason:
      counts[answer.skills.reason] += 1
  return counts


def refuse_many_failures(answers: Sequence[Answer], max_failure_share: float) -> None:
  """Stops a run that would otherwise turn into GRPO without anybody noticing.

  Raises:
    RuntimeError: if more than `max_failure_share` of at least `MIN_SAMPLE` trajectories failed.
  """
  failed = [answer for answer in answers if is_failure(answer.skills)]
  if len(answers) < MIN_SAMPLE or len(failed) <= max_failure_share * len(answers):
    return
  reasons = Counter(answer.skills.reason for answer in failed)
  examples = dict.fromkeys(f'{answer.skills.reason}: {answer.detail}' for answer in failed if answer.detail)
  raise RuntimeError(
    f'The analyzer failed for {len(failed)} of {len(answers)} trajectories of this training step, more than '
    f'analyzer.max_failure_share = {max_failure_share:g} allows '
    f'({", ".join(f"{reason} {n}" for reason, n in reasons.most_common())}). '
    f'Examples: {" | ".join(list(examples)[:3]) or "none recorded"}. '
    'Repair the analyzer, or raise the share (1 never stops: such trajectories train as GRPO).'
  )
