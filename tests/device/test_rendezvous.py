"""Processes that meet: who is awaited is said, and who was started wrongly is refused."""

import socket
import threading
import time

import pytest

from jaxrl_sched.device import multihost, rendezvous


def free_port():
  with socket.socket() as s:
    s.bind(('localhost', 0))
    return s.getsockname()[1]


class Meeting:
  """Threads in the place of processes; what each said and ended with, by name."""

  def __init__(self, limit_s=10.0):
    self.address, self.limit_s = f'localhost:{free_port()}', limit_s
    self.said, self.ends, self._threads = {}, {}, []

  def come(self, process, count, name=None):
    name = process if name is None else name
    said = self.said.setdefault(name, [])

    def body():
      try:
        rendezvous.meet(
          self.address,
          process,
          count,
          limit_s=self.limit_s,
          say=said.append,
          say_after_s=0.3,
        )
        self.ends[name] = None
      except Exception as error:
        self.ends[name] = error

    self._threads.append(threading.Thread(target=body, daemon=True))
    self._threads[-1].start()

  def end(self):
    for thread in self._threads:
      thread.join(timeout=30)
      assert not thread.is_alive()
    return self.ends


def test_all_meet_whoever_comes_first_and_the_port_is_free_again():
  meeting = Meeting()
  meeting.come(2, 3)
  time.sleep(0.5)
  meeting.come(0, 3)
  time.sleep(1)
  meeting.come(1, 3)
  assert meeting.end() == {0: None, 1: None, 2: None}
  assert meeting.said[2][0].startswith('Waiting for process 0 of 3 at localhost:')
  assert meeting.said[0][0].startswith('Waiting for process')
  assert any(
    text.startswith('Waiting for process 1 of 3 (') for text in meeting.said[2]
  )
  with socket.create_server(('localhost', int(meeting.address.split(':')[1]))):
    pass


def test_who_does_not_come_is_named_to_all():
  meeting = Meeting(limit_s=2.0)
  meeting.come(0, 4)
  meeting.come(3, 4)
  ends = meeting.end()
  for error in (ends[0], ends[3]):
    assert isinstance(error, rendezvous.Absent)
    assert str(error).startswith('processes 1, 2 of 4 did not come within 2 s')


def test_without_process_0_that_one_is_named():
  meeting = Meeting(limit_s=1.0)
  meeting.come(1, 2)
  error = meeting.end()[1]
  assert isinstance(error, rendezvous.Absent)
  assert str(error).startswith('process 0 of 2 at localhost:')


def test_two_of_one_number_are_refused():
  """Bad input on all of them: nothing would mend it by being started again."""
  meeting = Meeting()
  meeting.come(0, 3)
  meeting.come(1, 3, 'one')
  meeting.come(1, 3, 'another')
  for error in meeting.end().values():
    assert isinstance(error, ValueError)
    assert str(error) == 'two processes were started as process 1 of 3'


def test_processes_that_differ_in_their_number_are_refused():
  meeting = Meeting()
  meeting.come(0, 2)
  meeting.come(1, 4)
  ends = meeting.end()
  assert isinstance(ends[0], rendezvous.Refused)
  assert 'process 1 was started as one of 4 processes, process 0 as one of 2' in str(
    ends[0]
  )


def test_who_ended_while_it_waited_may_come_again_and_strangers_count_for_nothing():
  meeting = Meeting()
  meeting.come(0, 3)
  host, port = meeting.address.split(':')
  time.sleep(0.5)
  with socket.create_connection((host, int(port))) as stranger:
    stranger.sendall(b'GET / HTTP/1.1\r\n\r\n')
    with socket.create_connection((host, int(port))) as gone:
      gone.sendall(b'{"process": 1, "of": 3}\n')
      assert b'"awaited": [2]' in gone.recv(100)
    time.sleep(0.5)
    meeting.come(1, 3)
    meeting.come(2, 3)
    assert meeting.end() == {0: None, 1: None, 2: None}


@pytest.mark.parametrize('address', ['localhost', 'localhost:0', ':80', 'host:x'])
def test_an_address_that_is_none_is_refused(address):
  with pytest.raises(
    ValueError, match='JAX_COORDINATOR_ADDRESS: .* expected HOST:PORT'
  ):
    rendezvous.meet(address, 1, 2, limit_s=1, say=print)


@pytest.mark.parametrize('text', ['soon', '0', '-3', 'inf', 'nan'])
def test_a_limit_that_is_none_is_refused(text, monkeypatch):
  monkeypatch.setenv('JAXRL_WAIT_S', text)
  with pytest.raises(ValueError, match=f"JAXRL_WAIT_S: '{text}', expected seconds"):
    multihost.limit_s(300)


def test_the_limit_is_the_callers_unless_it_is_set(monkeypatch):
  monkeypatch.delenv('JAXRL_WAIT_S', raising=False)
  assert multihost.limit_s(300) == 300
  monkeypatch.setenv('JAXRL_WAIT_S', '90')
  assert multihost.limit_s(300) == 90
