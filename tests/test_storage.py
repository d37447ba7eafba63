"""gs:// everywhere, by the true clients, against an object store on this machine.

gcsfs and TensorStore speak to it as to Google's; only the address is another.
"""

from concurrent import futures
import importlib.util
import json
import pathlib

import jax
import numpy as np
from object_store import serving
import pyarrow
from pyarrow import parquet
import pytest
from toys import lines

from jaxrl_sched import config, export, settings, simulate, storage, train
from jaxrl_sched.device import hf_folder, weights
from jaxrl_sched.device.checkpoint import Checkpoints, SaveError
from jaxrl_sched.device.sources import open_source
from jaxrl_sched.metrics import Recorder

SMOKE = str(pathlib.Path(__file__).parents[1] / 'configs' / 'smoke.py')
UPLOAD = 'POST /upload'


@pytest.fixture(scope='module')
def server():
  """The clients are made once a process: one address has to serve all tests."""
  import fsspec

  with serving() as (store, address), pytest.MonkeyPatch.context() as patch:
    patch.setenv('STORAGE_EMULATOR_HOST', address)  # gcsfs, google-cloud-storage
    patch.setenv('TENSORSTORE_GCS_HTTP_URL', address)
    patch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'any')  # TensorStore
    # Or gcsfs would ask Google, by another way, which kind of bucket this is.
    patch.setenv('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
    patch.setenv('NO_GCE_CHECK', 'true')
    patch.setitem(fsspec.config.conf, 'gcs', {'token': 'anon'})
    yield store


@pytest.fixture
def store(server, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  server.clear()
  return server


def downloads(store) -> int:
  return sum('alt=media' in asked for asked in store.asked)


@pytest.mark.parametrize(
  'name, says',
  [
    ('s3://bucket/run', 'expected a local path, or gs://bucket/path'),
    ('gs://', 'expected a local path, or gs://bucket/path'),
    ('gs:///run', 'expected a local path, or gs://bucket/path'),
    ('gs://bucket/a/../b', 'expected a local path, or gs://bucket/path'),
    ('gs://bucket/a\nb', 'expected a local path, or gs://bucket/path'),
  ],
)
def test_other_names_are_refused(name, says):
  with pytest.raises(ValueError, match=says):
    storage.path(name, '--workdir=')


def test_what_is_missing_is_named(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(
    ValueError, match=r'^--workdir=gs://bucket/r: .*jaxrl_sched\[gcs\]'
  ):
    storage.path('gs://bucket/r', '--workdir=')


@pytest.mark.parametrize('status, kind', [(403, ValueError), (409, OSError)])
def test_a_store_that_refuses_is_told_in_one_line(store, status, kind):
  store.fault = lambda asked: status
  with pytest.raises(kind, match='^--workdir=gs://bucket/run: ') as refused:
    storage.path('gs://bucket/run', '--workdir=')
  assert '\n' not in str(refused.value)


# --- what is read ------------------------------------------------------------------


def test_records_are_those_of_the_file(store, tmp_path):
  records = [{'prompt': f'é{i}', 'answer': i} for i in range(100)]
  text = ''.join(json.dumps(r, ensure_ascii=False) + '\n' for r in records)
  store.put('bucket/data/a.jsonl', text.encode())
  parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / 'a.parquet')
  store.put('bucket/data/a.parquet', (tmp_path / 'a.parquet').read_bytes())
  for name, root in (
    ('gs://bucket/data/a.jsonl', '.'),
    ('data/a.jsonl', 'gs://bucket'),
    ('a.parquet', 'gs://bucket/data/'),
  ):
    source = open_source(name, {}, root)
    assert [source[i] for i in range(len(source))] == records
    assert source.where(0).startswith('gs://bucket/data/a.')
  assert open_source(str(tmp_path / 'a.parquet'), {}, 'gs://bucket')[7] == records[7]


def test_bad_data_is_told_by_its_name(store):
  store.put('bucket/a.jsonl', b'{"prompt": 1}\n{"prompt": \n')
  store.put('bucket/a.parquet', b'PAR')
  source = open_source('gs://bucket/a.jsonl', {}, '.')
  with pytest.raises(ValueError, match=r'^gs://bucket/a\.jsonl, line 2: not JSON'):
    source[1]
  with pytest.raises(ValueError, match=r'^gs://bucket/a\.parquet: not parquet'):
    open_source('a.parquet', {}, 'gs://bucket')
  with pytest.raises(ValueError, match=r'^gs://bucket/b\.jsonl: no such file'):
    open_source('b.jsonl', {}, 'gs://bucket')


def test_a_folder_is_copied_once_and_again_when_it_changed(store):
  for name in ('config.json', 'model.safetensors', 'consolidated.safetensors', 'a.bin'):
    store.put(f'bucket/m/{name}', name.encode())
  store.put('bucket/m/original/config.json', b'of another form')
  store.put('bucket/m/', b'')  # as Google's console marks a folder
  first = hf_folder.folder('gs://bucket/m')
  names = {p.name for p in first.iterdir()}
  assert names == {'config.json', 'model.safetensors'}
  assert (first / 'config.json').read_bytes() == b'config.json'
  asked = downloads(store)
  assert hf_folder.folder('gs://bucket/m/') == first and downloads(store) == asked
  alone = hf_folder.folder('gs://bucket/m', tokenizer_only=True)
  assert {p.name for p in alone.iterdir()} == {'config.json'}

  store.put('bucket/m/config.json', b'another')
  second = hf_folder.folder('gs://bucket/m')
  assert (second / 'config.json').read_bytes() == b'another'
  assert (first / 'config.json').read_bytes() == b'config.json'  # an open one stays
  with pytest.raises(ValueError, match='gs/bucket/m/generation'):
    hf_folder.read_json(second / 'generation_config.json')  # whose file it is
  with pytest.raises(ValueError, match=r'm/config\.json: a file, expected the folder'):
    hf_folder.folder('gs://bucket/m/config.json')
  with pytest.raises(ValueError, match='^gs://bucket/none: no such'):
    hf_folder.folder('gs://bucket/none')


def test_a_copy_is_whole_or_not_there(store, tmp_path):
  for i in range(4):
    store.put(f'bucket/m/{i}.json', b'x' * 1000)
  store.fault = lambda asked: (
    409 if '3.json' in asked and 'alt=media' in asked else None
  )
  with pytest.raises(storage.StorageError, match='^gs://bucket/m: '):
    storage.fetched('gs://bucket/m')
  assert not [p for p in (tmp_path / 'cache').rglob('m')]
  store.fault = lambda asked: None
  assert len(list(storage.fetched('gs://bucket/m').iterdir())) == 4


def test_what_changes_while_it_is_read_is_refused(store, tmp_path):
  def change(asked):
    if 'alt=media' in asked:
      store.put('bucket/m/b.json', b'longer than before')

  store.put('bucket/m/a.json', b'a')
  store.put('bucket/m/b.json', b'b')
  store.fault = change
  with pytest.raises(ValueError, match='^gs://bucket/m: was changed while it was read'):
    storage.fetched('gs://bucket/m')
  assert not [p for p in (tmp_path / 'cache').rglob('m')]


def test_of_several_at_once_one_copies(store):
  store.put('bucket/m/a.json', b'a' * 100)
  with futures.ThreadPoolExecutor(4) as pool:
    found = list(pool.map(storage.fetched, ['gs://bucket/m'] * 4))
  assert len(set(found)) == 1 and downloads(store) == 1


# --- what is written ---------------------------------------------------------------


def opened(stack_of=settings.only_one, name='gs://bucket/run'):
  return stack_of(storage.path(name))


def test_only_what_changed_is_copied_and_nothing_half_written(store):
  with opened() as home:
    (home.folder / 'a.jsonl').write_text('1\n')
    (home.folder / 'b.jsonl').write_text('1\n')
    (home.folder / '.b.json.half').write_text('{')
    (home.folder / 'report.html.new').write_text('<')
    (home.folder / 'tensorboard').mkdir()
    (home.folder / 'tensorboard' / 'events').write_bytes(b'\0')
    (home.folder / 'wandb').mkdir()
    (home.folder / 'wandb' / 'run').write_text('sent by itself')
    home.push()
    assert store.names('bucket/run') == [
      'bucket/run/a.jsonl',
      'bucket/run/b.jsonl',
      'bucket/run/owner.json',
      'bucket/run/tensorboard/events',
    ]
    store.asked.clear()
    with (home.folder / 'b.jsonl').open('a') as file:
      file.write('2\n')
    home.push()
  assert sum('upload_id' in asked for asked in store.asked) == 1
  assert store.read('bucket/run/b.jsonl') == b'1\n2\n'
  # What is there is the truth when a run goes on, on any host.
  store.put('bucket/run/a.jsonl', b'from elsewhere\n')
  with opened() as home:
    assert (home.folder / 'a.jsonl').read_text() == 'from elsewhere\n'
    assert home.folder.name == 'run'  # the report's title
    assert {p.name for p in home.folder.iterdir()} == {'a.jsonl', 'b.jsonl'}


def test_a_broken_upload_leaves_what_was_there(store):
  """gcsfs sends a large file in parts; the second is not taken."""
  with opened() as home:
    (home.folder / 'a.jsonl').write_bytes(b'a\n' * 10)
    home.push()
    (home.folder / 'a.jsonl').write_bytes(b'a\n' * 6_000_000)
    parts = []

    def fault(asked):
      if 'upload_id' in asked:
        parts.append(asked)
      return 409 if len(parts) > 1 else None

    store.fault = fault
    with pytest.raises(storage.StorageError, match='^gs://bucket/run: '):
      home.push()
    assert len(parts) > 1
    assert store.read('bucket/run/a.jsonl') == b'a\n' * 10
    store.fault = lambda asked: None
    home.push()
    assert store.read('bucket/run/a.jsonl') == b'a\n' * 6_000_000


def test_what_cannot_be_read_whole_here_is_not_written_there(store, monkeypatch):
  """fsspec closes a file that failed half-way, and takes what it got for the whole."""
  from gcsfs.core import GCSFile

  write, pieces = GCSFile.write, []

  def fail_at_the_third(self, data):
    pieces.append(data)
    if len(pieces) == 3:
      raise OSError('a bad sector')
    return write(self, data)

  with opened() as home:
    (home.folder / 'a.jsonl').write_bytes(b'a\n' * 10)
    home.push()
    (home.folder / 'a.jsonl').write_bytes(b'a\n' * 2_000_000)
    monkeypatch.setattr(GCSFile, 'write', fail_at_the_third)
    with pytest.raises(storage.StorageError, match='a bad sector'):
      home.push()
    assert store.read('bucket/run/a.jsonl') == b'a\n' * 10
    monkeypatch.setattr(GCSFile, 'write', write)


def test_the_run_that_comes_last_has_the_workdir(store, monkeypatch, tmp_path):
  """No lock there: the earlier one, on another host, finds out before it writes."""
  with pytest.raises(ValueError, match='^gs://bucket/run: taken over by a run'):
    with opened() as first:
      (first.folder / 'a.jsonl').write_text('first\n')
      first.push()
      with pytest.raises(ValueError, match='another run is at work there'):
        opened().__enter__()  # on this host there are locks
      monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another host'))
      with opened() as second:
        assert (second.folder / 'a.jsonl').read_text() == 'first\n'
        (second.folder / 'a.jsonl').write_text('first\nsecond\n')
        second.push()
      (first.folder / 'a.jsonl').write_text('first\nfirst\n')
      first.push()
  assert store.read('bucket/run/a.jsonl') == b'first\nsecond\n'


class Clock:
  """Stands for storage's `time`."""

  now = 0.0

  def monotonic(self) -> float:
    return self.now


@pytest.mark.parametrize('between', [0.0, 61.0], ids=['none', 'copies between'])
@pytest.mark.parametrize('killed_after', [4, 7])
def test_a_run_killed_anywhere_leaves_the_files_of_one_that_was_not(
  store, monkeypatch, tmp_path, between, killed_after
):
  """Steps from the checkpoint on are written again; `between`: seconds a step takes."""
  clock = Clock()
  monkeypatch.setattr(storage, 'time', clock)

  def steps(recorder, first, last):
    for step in range(first, last):
      clock.now += between
      if step == 4:
        recorder.flush()  # and a checkpoint
      recorder.rollouts(step, [{'draw': step, 'fate': 'trained'}])
      recorder.log(step, {'loss': 1 / (1 + step)})

  quiet = dict(steps=9, tensorboard=False, console=False)
  with Recorder(tmp_path / 'undisturbed', **quiet) as recorder:
    steps(recorder, 0, 9)
  killed = storage.Home(tmp_path, storage.path('gs://bucket/run'))
  steps(Recorder(killed.folder, home=killed, **quiet), 0, killed_after + 1)
  there = store.read('bucket/run/rollouts.jsonl').count(b'\n')
  assert there == (8 if between and killed_after == 7 else 4)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another host'))
  with opened() as home, Recorder(home.folder, home=home, start=4, **quiet) as recorder:
    steps(recorder, 4, 9)
  for name in ('metrics.jsonl', 'rollouts.jsonl'):
    expected = (tmp_path / 'undisturbed' / name).read_bytes()
    assert store.read(f'bucket/run/{name}') == expected


def test_a_copy_that_nobody_waits_for_may_fail_but_not_one_before_a_checkpoint(
  store, monkeypatch, capsys
):
  monkeypatch.setattr(storage, 'time', clock := Clock())
  quiet = dict(steps=9, tensorboard=False, console=False)
  with opened() as home, Recorder(home.folder, home=home, **quiet) as recorder:
    recorder.log(0, {'loss': 0.5})
    clock.now += 61
    store.fault = lambda asked: 409 if asked.startswith(UPLOAD) else None
    recorder.log(1, {'loss': 0.25})
    assert 'Not copied this time: gs://bucket/run: ' in capsys.readouterr().err
    with pytest.raises(storage.StorageError, match='^gs://bucket/run: '):
      recorder.flush()
    store.fault = lambda asked: None
  assert store.read('bucket/run/metrics.jsonl').count(b'\n') == 2


def test_a_new_folder_that_cannot_be_written_whole_is_not_there(store):
  folder = storage.path('gs://bucket/out/m')
  order = []

  def fault(asked):
    if asked.startswith(UPLOAD):
      order.append(asked)
      if len(order) == 3:
        return 409
    return None

  def write():
    with storage.written(folder) as here:
      here.mkdir()
      for name in ('config.json', 'a.safetensors', 'b.safetensors'):
        (here / name).write_text(name)

  store.fault = fault
  with pytest.raises(storage.StorageError, match='^gs://bucket/out/m: '):
    write()
  assert store.names() == []
  store.fault = lambda asked: None
  write()
  made = sorted(store.objects, key=lambda name: store.objects[name]['generation'])
  assert len(made) == 3 and made[-1] == 'bucket/out/m/config.json'
  with pytest.raises(ValueError, match='^export: gs://bucket/out/n, expected a local'):
    weights.export(None, {}, 'gs://bucket/out/n')  # which would make a folder 'gs:'


# --- all of it ---------------------------------------------------------------------


def unwritable_after(store, name):
  """Nothing can be written any more once that object is there."""
  return lambda asked: (
    409 if name in store.objects and asked.startswith(('POST', 'PUT')) else None
  )


def test_a_checkpoint_is_committed_or_cleaned_away(store):
  at = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  state = {'w': jax.device_put(np.arange(6.0, dtype=np.float32), at)}
  like = {'w': jax.ShapeDtypeStruct((6,), np.float32, sharding=at)}
  folder = 'gs://bucket/run/checkpoints'
  storage.path(folder)

  def save(checkpoints, step):
    control = {'draws': np.arange(step)}
    checkpoints.save(step, state, control=control, pending=[step], score=None)

  checkpoints = Checkpoints(folder, keep=1)  # a new folder, of which there is no sign
  save(checkpoints, 1)
  save(checkpoints, 2)
  checkpoints.close()
  checkpoints = Checkpoints(folder, keep=1)
  store.fault = unwritable_after(store, 'bucket/run/checkpoints/3/pending.json')
  save(checkpoints, 3)
  with pytest.raises(SaveError, match='gs://bucket/run/checkpoints') as failed:
    checkpoints.close()
  assert '\n' not in str(failed.value)
  store.fault = lambda asked: None
  checkpoints = Checkpoints(folder, keep=1)
  assert {name.split('/')[3] for name in store.names()} == {'2'}
  step, found, control, pending = checkpoints.restore(like)
  checkpoints.close()
  assert (step, control['draws'].tolist(), pending) == (2, [0, 1], [2])
  assert found['w'].tolist() == list(range(6))


RUN = ['--config.steps=4', '--config.evaluate=None', '--config.checkpoint.every=2']


def test_a_run_in_a_bucket(store, tmp_path, capsys):
  """Broken off between two checkpoints and gone on with, its files are those of a run
  in a folder; its policy is exported into the bucket, and read from there."""
  argv = [f'--config={SMOKE}', *RUN]
  assert train.main([*argv, f'--workdir={tmp_path / "local"}']) == 0
  argv.append('--workdir=gs://bucket/run')
  store.fault = unwritable_after(store, 'bucket/run/checkpoints/2/commit_success.txt')
  capsys.readouterr()
  assert train.main(argv) == 1
  (told,) = [s for s in capsys.readouterr().err.splitlines() if 'gs://' in s]
  assert told.startswith('error: gs://bucket/run')
  store.fault = lambda asked: None
  assert train.main(argv) == 0
  assert 'Resuming after step 2.' in capsys.readouterr().out
  for name in ('config.json', 'report.html', 'checkpoints/4/commit_success.txt'):
    assert f'bucket/run/{name}' in store.names('bucket/run')
  for name in ('metrics.jsonl', 'rollouts.jsonl', 'samples.jsonl'):
    (tmp_path / name).write_bytes(store.read(f'bucket/run/{name}'))
    assert lines(tmp_path, name) == lines(tmp_path / 'local', name), name

  # Its records are what a simulation is made from.
  argv = [f'--config={SMOKE}', '--costs=gs://bucket/run', '--trace=gs://bucket/run']
  assert simulate.main([*argv, '--steps=2']) == 0
  argv = ['--workdir=gs://bucket/run', '--out=gs://bucket/out/m']
  assert export.main(argv) == 0
  assert export.main(argv) == 2  # it is there
  _, found = weights.load('gs://bucket/out/m')
  folder = tmp_path / 'local'
  run = config.prepare(config.of_workdir(None, folder, []))
  _, expected = export.checkpointed(run.c, folder, 4)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
