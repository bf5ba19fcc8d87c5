"""A real OpenAI-compatible HTTP server on 127.0.0.1 that misbehaves exactly as a script says.

    with FakeEndpoint(lambda prompt, nth: answer(SKILLS) if nth else status(500)) as endpoint:
      ... base_url=endpoint.url ...

The script sees the prompt and how often that very prompt was asked before (0 the first time), so that what it
answers does not depend on the order in which parallel requests arrive.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

# Nothing waits longer than this, whatever the client does.
MAX_HANG_S = 20.0
SKILLS = '{"episode_summary": "s", "episode_skill": "check the price", "step_skills": {"0": "search first"}}'


class Reply(NamedTuple):
  """One HTTP response: status, body, extra headers, what goes wrong besides.

  Attributes:
    delay_s: seconds before anything is sent.
    hangs: no byte is ever sent.
    breaks: the connection closes in the middle of the body.
  """

  code: int = 200
  body: bytes = b''
  headers: tuple[tuple[str, str], ...] = ()
  delay_s: float = 0.0
  hangs: bool = False
  breaks: bool = False


class Request(NamedTuple):
  """What arrived: the decoded body, the path, the Authorization header, the monotonic time."""

  body: dict[str, Any]
  path: str
  key: str
  at: float


def answer(content: Any, *, finish: str = 'stop', delay_s: float = 0.0, tokens=(10, 5), **message) -> Reply:
  """A chat completion; `message` adds fields such as `refusal` or `reasoning_content`."""
  return completion({'choices': [{
    'index': 0, 'finish_reason': finish, 'message': {'role': 'assistant', 'content': content, **message},
  }]}, tokens=tokens, delay_s=delay_s)


def completion(fields: dict[str, Any], *, tokens=(10, 5), delay_s: float = 0.0) -> Reply:
  """A chat completion with these fields, for shapes that `answer` cannot make."""
  usage = {'prompt_tokens': tokens[0], 'completion_tokens': tokens[1], 'total_tokens': sum(tokens)}
  document = {'id': 'x', 'object': 'chat.completion', 'created': 0, 'model': 'fake', 'usage': usage, **fields}
  return Reply(body=json.dumps(document).encode(), delay_s=delay_s)


def status(code: int, *, error: str = 'scripted', retry_after: str = '', error_code: str = '') -> Reply:
  """An HTTP error."""
  body = json.dumps({'error': {'message': error, 'type': 'scripted', 'code': error_code}}).encode()
  return Reply(code=code, body=body, headers=(('Retry-After', retry_after),) if retry_after else ())


def garbage(body: bytes = b'<html>bad gateway</html>', content_type: str = 'application/json') -> Reply:
  """HTTP 200 with a body that is no chat completion."""
  return Reply(body=body, headers=(('Content-Type', content_type),))


def hang() -> Reply:
  """No answer at all."""
  return Reply(hangs=True)


def broken() -> Reply:
  """The connection closes in the middle of the body."""
  return answer('{"episode_skill": "half')._replace(breaks=True)


class FakeEndpoint:
  """The server; a context manager.

  Attributes:
    requests: all requests, in the order of arrival.
    most_at_once: most requests that were open at the same time.
    url: base URL for the client.
  """

  def __init__(self, script: Callable[[str, int], Reply]):
    self.requests: list[Request] = []
    self.most_at_once = 0
    self._script = script
    self._seen: Counter[str] = Counter()
    self._open = 0
    self._lock = threading.Lock()
    self._closing = threading.Event()
    self._server = _Server(('127.0.0.1', 0), self._handler())
    self.url = f'http://127.0.0.1:{self._server.server_address[1]}/v1'
    self._thread = threading.Thread(target=self._serve, daemon=True)

  def __enter__(self) -> 'FakeEndpoint':
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self._closing.set()
    self._server.shutdown()
    self._server.server_close()
    self._thread.join(5)

  def _serve(self) -> None:
    self._server.serve_forever(poll_interval=0.02)

  def _handler(endpoint) -> type[BaseHTTPRequestHandler]:  # noqa: N805 (the handler inside has its own self)
    class Handler(BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def do_POST(self):  # noqa: N802 (name given by the base class)
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        key = self.headers.get('Authorization', '')
        reply = endpoint._arrived(Request(body, self.path, key, time.monotonic()))
        endpoint._closing.wait(MAX_HANG_S if reply.hangs else reply.delay_s)
        with endpoint._lock:
          endpoint._open -= 1
        if reply.hangs:
          self.close_connection = True
          return
        self.send_response(reply.code)
        headers = {'Content-Type': 'application/json', **dict(reply.headers)}
        for name, value in (*headers.items(), ('Content-Length', str(len(reply.body)))):
          self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body[:len(reply.body) // 2] if reply.breaks else reply.body)
        self.close_connection = reply.breaks

      def log_message(self, *_):
        """Quiet."""

    return Handler

  def _arrived(self, request: Request) -> Reply:
    prompt = request.body['messages'][-1]['content']
    with self._lock:
      self.requests.append(request)
      self._open += 1
      self.most_at_once = max(self.most_at_once, self._open)
      nth = self._seen[prompt]
      self._seen[prompt] += 1
    return self._script(prompt, nth)


class _Server(ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 256

  def handle_error(self, request, client_address):
    """A client that gave up is part of the script."""
