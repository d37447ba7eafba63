"""Google Cloud Storage on this machine: what gcsfs and TensorStore ask of its JSON API.

An object store as the real one: an object is there whole when its upload ends, or not
at all; nothing can be appended to; there are no folders, so no rename of one.
"""

from collections.abc import Callable, Iterator
import contextlib
import datetime
import email
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import re
import threading
from urllib.parse import parse_qsl, unquote, urlsplit

OBJECT = re.compile(r'(?:/download)?/storage/v1/b/([^/]+)/o/(.+)')
MOVE = re.compile(r'/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)')


class Store:
  """Objects by 'bucket/name'. Any bucket exists.

  Attributes:
    asked: what was asked for so far, as 'GET /path?query'.
    fault: from such a text to a status other than success, or None.
  """

  def __init__(self):
    self.lock = threading.RLock()
    self.generation = 0
    self.clear()

  def clear(self) -> None:
    self.asked: list[str] = []
    self.fault: Callable[[str], int | None] = lambda asked: None
    self.objects: dict[str, dict] = {}
    self.uploads: dict[str, tuple[str, bytearray]] = {}

  def put(self, name: str, content: bytes) -> dict:
    with self.lock:
      self.generation += 1
      now = f'{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S.%fZ}'
      self.objects[name] = dict(content=content, generation=self.generation, at=now)
      return self.describe(name)

  def describe(self, name: str) -> dict:
    bucket, _, key = name.partition('/')
    found = self.objects[name]
    return {
      'kind': 'storage#object',
      'bucket': bucket,
      'name': key,
      'size': str(len(found['content'])),
      'generation': str(found['generation']),
      'metageneration': '1',
      'storageClass': 'STANDARD',
      'timeCreated': found['at'],
      'updated': found['at'],
    }

  def names(self, under: str = '') -> list[str]:
    with self.lock:
      return sorted(name for name in self.objects if name.startswith(under))

  def read(self, name: str) -> bytes:
    return self.objects[name]['content']

  def listing(self, bucket: str, asked: dict[str, str]) -> dict:
    prefix, cut = asked.get('prefix', ''), asked.get('delimiter')
    items, prefixes = [], set()
    for name in self.names(f'{bucket}/{prefix}'):
      key = name.partition('/')[2]
      rest = key[len(prefix) :]
      if cut and cut in rest:
        prefixes.add(prefix + rest.split(cut)[0] + cut)
      else:
        items.append(self.describe(name))
    return {'kind': 'storage#objects', 'items': items, 'prefixes': sorted(prefixes)}


class Handler(BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True

  def log_message(self, *_) -> None:
    pass

  def is_refused(self) -> bool:
    asked = f'{self.command} {unquote(self.path)}'
    self.store.asked.append(asked)
    status = self.store.fault(asked)
    if status is not None:
      self.answer({'error': {'code': status, 'message': 'a fault'}}, status)
    return status is not None

  def do_GET(self) -> None:
    if self.is_refused():
      return
    url = urlsplit(self.path)
    asked = dict(parse_qsl(url.query))
    with self.store.lock:
      if match := re.fullmatch(r'/storage/v1/b/([^/]+)/o', url.path):
        return self.answer(self.store.listing(match[1], asked))
      if match := re.fullmatch(r'/storage/v1/b/([^/]+)', url.path):
        return self.answer({'kind': 'storage#bucket', 'name': match[1]})
      match = OBJECT.fullmatch(url.path)
      name = f'{match[1]}/{unquote(match[2])}' if match else ''
      if name not in self.store.objects:
        return self.answer({'error': {'code': 404, 'message': 'Not Found'}}, 404)
      if asked.get('alt') != 'media':
        return self.answer(self.store.describe(name))
      content, found = self.store.read(name), self.store.objects[name]
    self.content(content, found['generation'])

  def content(self, content: bytes, generation: int) -> None:
    size = len(content)
    headers = {'x-goog-generation': generation, 'x-goog-stored-content-length': size}
    wanted = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))
    if not wanted:
      return self.send(content, 200, headers)
    first, last = int(wanted[1]), int(wanted[2] or size - 1)
    if first >= size:
      return self.send(b'', 416, headers)
    last = min(last, size - 1)
    headers['Content-Range'] = f'bytes {first}-{last}/{size}'
    self.send(content[first : last + 1], 206, headers)

  def do_DELETE(self) -> None:
    if self.is_refused():
      return
    match = OBJECT.fullmatch(urlsplit(self.path).path)
    self.send(b'', self.delete(f'{match[1]}/{unquote(match[2])}'))

  def delete(self, name: str) -> int:
    with self.store.lock:
      return 404 if self.store.objects.pop(name, None) is None else 204

  def do_POST(self) -> None:
    body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
    if self.is_refused():
      return
    url = urlsplit(self.path)
    asked = dict(parse_qsl(url.query))
    if url.path == '/batch/storage/v1':
      return self.batch(body.decode())
    if match := MOVE.fullmatch(url.path):
      source, target = (f'{match[1]}/{unquote(key)}' for key in match.groups()[1:])
      with self.store.lock:
        if source not in self.store.objects:
          return self.answer({'error': {'code': 404}}, 404)
        made = self.store.put(target, self.store.objects.pop(source)['content'])
      return self.answer(made)
    match = re.fullmatch(r'/upload/storage/v1/b/([^/]+)/o', url.path)
    if match is None:
      return self.answer({'error': {'code': 404, 'message': self.path}}, 404)
    self.upload(match[1], asked, body)

  do_PUT = do_POST

  def upload(self, bucket: str, asked: dict[str, str], body: bytes) -> None:
    store, kind = self.store, asked.get('uploadType')
    if 'upload_id' in asked:
      return self.resume(asked['upload_id'], body)
    if kind == 'resumable':
      name = asked.get('name') or json.loads(body)['name']
      key = f'u{len(store.uploads):024}'
      store.uploads[key] = (f'{bucket}/{name}', bytearray())
      host = self.headers['Host']
      at = f'http://{host}{urlsplit(self.path).path}?upload_id={key}'
      return self.send(b'', 200, {'Location': at})
    if kind == 'multipart':
      head = f'Content-Type: {self.headers["Content-Type"]}\n\n'.encode()
      about, data = email.message_from_bytes(head + body).get_payload()
      name = json.loads(about.get_payload())['name']
      # Not as email has it, which would change line ends.
      body = body[body.index(b'\n\n', body.index(b'\n--', 5)) + 2 :]
      body = body[: body.rindex(b'\n--')]
    else:
      name = asked['name']
    with store.lock:
      found = store.objects.get(f'{bucket}/{name}')
      wanted = asked.get('ifGenerationMatch')
      if wanted is not None and int(wanted) != (found['generation'] if found else 0):
        return self.answer({'error': {'code': 412}}, 412)
      made = store.put(f'{bucket}/{name}', body)
    self.answer(made)

  def resume(self, key: str, body: bytes) -> None:
    """Nothing is there before the last part."""
    name, so_far = self.store.uploads[key]
    so_far += body
    total = self.headers['Content-Range'].rpartition('/')[2]
    if total == '*' or len(so_far) < int(total):
      return self.send(b'', 308, {'Range': f'bytes=0-{len(so_far) - 1}'})
    self.answer(self.store.put(name, bytes(so_far)))

  def batch(self, text: str) -> None:
    parts = []
    for bucket, key in re.findall(r'DELETE /storage/v1/b/([^/]+)/o/([^ ?]+)', text):
      code = self.delete(f'{bucket}/{unquote(key)}')
      parts.append(
        f'--b\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {code} -\r\n'
      )
    body = ''.join(parts) + '--b--'
    self.send(body.encode(), 200, {'Content-Type': 'multipart/mixed; boundary=--b'})

  def answer(self, content: dict, code: int = 200) -> None:
    self.send(json.dumps(content).encode(), code, {'Content-Type': 'application/json'})

  def send(self, body: bytes, code: int, headers: dict | None = None) -> None:
    self.send_response(code)
    for key, value in (headers or {}).items():
      self.send_header(key, str(value))
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)


@contextlib.contextmanager
def serving() -> Iterator[tuple[Store, str]]:
  """A store, and its address, to be STORAGE_EMULATOR_HOST."""
  store = Store()
  handler = type('Bound', (Handler,), {'store': store})
  server = ThreadingHTTPServer(('127.0.0.1', 0), handler)
  server.daemon_threads = True
  server.handle_error = lambda *_: None  # a client that hangs up
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  try:
    yield store, f'http://127.0.0.1:{server.server_port}'
  finally:
    server.shutdown()
    server.server_close()
