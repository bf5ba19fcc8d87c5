"""Any OpenAI-compatible endpoint as the analyzer: bounded in requests in flight, in time and in tokens.

What is asked again, always within `max_attempts` and the time of the training step:
- time-outs, refused or broken connections, HTTP 408, 409, 429 and 5xx, bodies that are no chat completion:
  with growing pauses, and never before the moment that Retry-After names (which pauses every request);
- replies cut by the length limit, once, with twice the limit; refusals, once; unusable JSON, once, with a
  note.
An empty reply and any other HTTP 4xx are final for that trajectory. 401, 402, 403, 404 and a used-up quota
are final for the run: no request could succeed, so it stops at once.
"""

import asyncio
import datetime
import email.utils
import os
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opid_jax.analyzers import prompt, reply
from opid_jax.analyzers.base import Answer, Pending, Settings, Usage, read_settings
from opid_jax.types import Skills, Trajectory

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0

_FATAL_STATUS = (401, 402, 403, 404)
_TRANSPORT = frozenset({'timeout', 'connection', 'rate_limited', 'server_error', 'invalid_response'})
_ONCE_MORE = frozenset({'truncated', 'refused', 'invalid_json', 'no_json', 'no_skill'})
# Seconds that cancelled requests get to close their connections.
_CLOSING_S = 5.0


class Trouble(NamedTuple):
  """Why a request brought nothing.

  Attributes:
    reason: one word, see `Skills.reason`.
    detail: what exactly, one line.
    retry_after: seconds that the endpoint asks to wait.
  """

  reason: str
  detail: str
  retry_after: float = 0.0


def make(settings: Mapping[str, Any], *, generate: Any = None) -> 'OpenAIAnalyzer':
  """An analyzer that asks the endpoint named in the settings. `generate` is not used.

  Raises:
    ImportError: if the package `openai` is not installed.
    ValueError: if a setting is missing or wrong, or there is no key for OpenAI's own address.
  """
  del generate
  s = read_settings(settings)
  try:
    import openai  # noqa: F401
  except ImportError as error:
    raise ImportError('The analyzer "openai" needs the package openai: pip install openai') from error
  if not s.model:
    raise ValueError('analyzer.model is empty; name the model of the endpoint, for example glm-5.2.')
  if s.base_url and not s.base_url.startswith(('http://', 'https://')):
    raise ValueError(f'analyzer.base_url is {s.base_url!r}; it must begin with http:// or https://.')
  key = os.environ.get(s.api_key_env, '')
  if not key and not s.base_url:
    raise ValueError(f'The environment variable {s.api_key_env} (analyzer.api_key_env) holds no key; set it, '
                     'or name an endpoint that needs none in analyzer.base_url.')
  return OpenAIAnalyzer(s, key or 'none')


class OpenAIAnalyzer:
  """See `opid_jax.analyzers.base.Analyzer`. All requests run in one event loop on one background thread."""

  def __init__(self, settings: Settings, api_key: str):
    self._settings = settings
    self._api_key = api_key
    self._client = None
    self._slots = asyncio.Semaphore(settings.concurrency)
    self._resume_at = 0.0
    self._spent = 0
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name='analyzer', daemon=True)
    self._thread.start()

  def submit(self, trajectories: Sequence[Trajectory]) -> Pending:
    """The clock of the training step starts now, not when the result is asked for.

    The result raises RuntimeError if the endpoint refuses key, model or address.
    """
    s = self._settings
    prompts = [
      prompt.build(trajectory, max_step_skills=s.max_step_skills, max_chars=s.max_prompt_chars)
      for trajectory in trajectories
    ]
    future = asyncio.run_coroutine_threadsafe(self._answer_all(list(trajectories), prompts), self._loop)
    return Pending(future.result, s.max_failure_share)

  def close(self) -> None:
    """Closes the connections and ends the thread."""
    if self._client is not None:
      asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result(_CLOSING_S)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_CLOSING_S)
    self._loop.close()

  async def _answer_all(self, trajectories: list[Trajectory], prompts: list[str]) -> list[Answer]:
    deadline = self._loop.time() + self._settings.step_timeout_s
    usages = [Usage() for _ in trajectories]
    tasks = [
      asyncio.create_task(self._answer(trajectory, text, usage, deadline))
      for trajectory, text, usage in zip(trajectories, prompts, usages, strict=True)
    ]
    if not tasks:
      return []
    done, late = await asyncio.wait(
      tasks, timeout=self._settings.step_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
      task.cancel()
    if late:
      await asyncio.wait(late, timeout=_CLOSING_S)
    for task in done:
      task.result()
    detail = f'not finished after analyzer.step_timeout_s = {self._settings.step_timeout_s:g}'
    return [
      task.result() if task in done else Answer(Skills(reason='timeout'), detail=detail, usage=usage)
      for task, usage in zip(tasks, usages, strict=True)
    ]

  async def _answer(self, trajectory: Trajectory, text: str, usage: Usage, deadline: float) -> Answer:
    """Asks until there are skills or no reason to ask again."""
    s = self._settings
    # Pauses are the same in every run of the same configuration, yet differ between trajectories.
    jitter = random.Random(f'{trajectory.group}/{trajectory.attempt}')
    limit, asked, seen, dropped = s.max_reply_tokens, text, set(), 0
    for attempt in range(s.max_attempts):
      outcome = await self._ask(asked, limit, usage, deadline)
      if isinstance(outcome, str):
        skills, dropped = reply.parse_counted(
          outcome, num_steps=len(trajectory.steps), max_step_skills=s.max_step_skills)
        if skills.usable:
          return Answer(skills, dropped=dropped, usage=usage)
        trouble = Trouble(skills.reason, f'the reply ends {outcome[-120:]!r}')
        asked = prompt.again(text, outcome, skills.reason)
      else:
        trouble = outcome
      if trouble.reason == 'truncated':
        limit, asked = 2 * s.max_reply_tokens, text
      if attempt == s.max_attempts - 1 or trouble.reason not in _TRANSPORT | (_ONCE_MORE - seen):
        break
      seen.add(trouble.reason)
      if trouble.reason in _TRANSPORT:
        pause = min(FIRST_PAUSE_S * 2 ** attempt, MAX_PAUSE_S) * (0.5 + jitter.random())
        if self._loop.time() + max(pause, trouble.retry_after) >= deadline:
          break
        await asyncio.sleep(max(pause, trouble.retry_after))
    return Answer(Skills(reason=trouble.reason), detail=trouble.detail, dropped=dropped, usage=usage)

  async def _ask(self, text: str, limit: int, usage: Usage, deadline: float) -> str | Trouble:
    """One request: the text of the reply, or what went wrong."""
    import openai

    s = self._settings
    async with self._slots:
      while (pause := self._resume_at - self._loop.time()) > 0:
        if self._resume_at >= deadline:
          return Trouble('rate_limited', f'the endpoint asks to wait {pause:.0f} s more')
        await asyncio.sleep(pause)
      if 0 < s.token_budget <= self._spent:
        return Trouble('budget', f'{self._spent} of {s.token_budget} tokens are spent')
      usage.requests += 1
      usage.retries += usage.requests > 1
      try:
        async with asyncio.timeout(s.timeout_s):
          completion = await self._connected().chat.completions.create(
            model=s.model, messages=[{'role': 'user', 'content': text}], temperature=s.temperature,
            max_tokens=limit)
      except (TimeoutError, openai.APITimeoutError):
        return Trouble('timeout', f'no answer within analyzer.timeout_s = {s.timeout_s:g}')
      except openai.APIConnectionError as error:
        return Trouble('connection', _line(error.__cause__ or error))
      except openai.APIStatusError as error:
        return self._status_trouble(error)
      # The client decodes the body: what is no JSON, or JSON of another shape, ends here.
      except (openai.APIResponseValidationError, ValueError) as error:
        return Trouble('invalid_response', _line(error))
      self._charge(completion, text, usage)
      return _text_of(completion)

  def _connected(self) -> Any:
    """The client, made inside the loop that uses it. It never repeats a request by itself: we count them."""
    import openai

    if self._client is None:
      self._client = openai.AsyncOpenAI(
        api_key=self._api_key, base_url=self._settings.base_url or None, timeout=self._settings.timeout_s,
        max_retries=0)
    return self._client

  def _status_trouble(self, error: Any) -> Trouble:
    """What an HTTP error status means.

    Raises:
      RuntimeError: if no request of this run can succeed.
    """
    s = self._settings
    status = error.status_code
    detail = f'HTTP {status}: {_line(error)}'
    if status in _FATAL_STATUS or error.code == 'insufficient_quota':
      raise RuntimeError(
        f'The endpoint {s.base_url or "api.openai.com"} refuses model {s.model!r} ({detail}). Check '
        f'analyzer.model, analyzer.base_url and the key in the variable {s.api_key_env}.') from error
    retry_after = _retry_after(error.response.headers)
    self._resume_at = max(self._resume_at, self._loop.time() + retry_after)
    if status == 429:
      return Trouble('rate_limited', detail, retry_after)
    if status >= 500 or status in (408, 409):
      return Trouble('server_error', detail, retry_after)
    return Trouble('bad_request', detail)

  def _charge(self, completion: Any, text: str, usage: Usage) -> None:
    """Counts tokens as the endpoint reports them; the budget falls back to four characters a token."""
    reported = getattr(completion, 'usage', None)
    spent = [getattr(reported, name, None) for name in ('prompt_tokens', 'completion_tokens')]
    tokens_in, tokens_out = (value if isinstance(value, int) else 0 for value in spent)
    usage.tokens_in += tokens_in
    usage.tokens_out += tokens_out
    self._spent += tokens_in + tokens_out or len(text) // 4


def _text_of(completion: Any) -> str | Trouble:
  """The reply's text. Endpoints differ in what they leave out, so nothing is taken for granted."""
  if not hasattr(completion, 'choices'):
    return Trouble('invalid_response', f'no chat completion: {str(completion)[:120]!r}')
  choices = completion.choices
  choice = choices[0] if isinstance(choices, list) and choices else None
  message = getattr(choice, 'message', None)
  content = getattr(message, 'content', None)
  if isinstance(content, list):
    parts = [part.get('text') if isinstance(part, dict) else getattr(part, 'text', None) for part in content]
    content = ''.join(part for part in parts if isinstance(part, str))
  finish = getattr(choice, 'finish_reason', None)
  if finish == 'length':
    return Trouble('truncated', 'the reply hit analyzer.max_reply_tokens')
  if isinstance(content, str) and content.strip():
    return content
  refusal = getattr(message, 'refusal', None)
  if refusal or finish == 'content_filter':
    return Trouble('refused', str(refusal or 'content filter')[:120])
  return Trouble('empty', f'a reply without text (finish_reason {finish!r})')


def _retry_after(headers: Mapping[str, str]) -> float:
  """Seconds to wait by a Retry-After header, a number or an HTTP date; 0 if there is none or it is wrong."""
  value = headers.get('retry-after', '')
  try:
    seconds = float(headers['retry-after-ms']) / 1000 if 'retry-after-ms' in headers else float(value)
  except ValueError:
    try:
      moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
      return 0.0
    # A date that ends in -0000 comes without a zone; it is universal time.
    moment = moment.replace(tzinfo=moment.tzinfo or datetime.UTC)
    seconds = (moment - datetime.datetime.now(datetime.UTC)).total_seconds()
  # Also false for NaN.
  return min(seconds, 86400.0) if seconds > 0 else 0.0


def _line(error: BaseException) -> str:
  return ' '.join((str(error) or type(error).__name__).split())[:200]
