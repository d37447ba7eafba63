"""What Checkpoints promises: whole or not at all, exact, on any mesh, the best kept."""

import json
import pathlib
import random
import shutil
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

from jaxrl_sched.device.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]


def mesh(data: int, model: int) -> Mesh:
  devices = np.array(jax.devices()[: data * model]).reshape(data, model)
  return Mesh(devices, ('data', 'model'))


def on(mesh: Mesh, *axes: str | None) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(*axes))


def state_of(step: int, *, on_mesh: Mesh | None = None, rows: int = 8) -> dict:
  """Arrays that nothing but this step has, in every dtype that a run keeps."""
  at = on_mesh or mesh(1, 1)
  noise = np.random.default_rng(step).normal(size=(rows, 16)).astype(np.float32)
  return {
    'params': {
      'layers': [jax.device_put(noise, on(at, 'data', 'model'))],
      'norm': jax.device_put(jnp.asarray(noise[0], jnp.bfloat16), on(at, 'model')),
    },
    'step': jax.device_put(np.int32(step), on(at)),
  }


def like(state, sharding=None):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding),
    state,
  )


def assert_same(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save(checkpoints, step, *, score=None, control=None, pending=None, state=None):
  checkpoints.save(
    step,
    state or state_of(step),
    control=control or {'step': step},
    pending=pending or [],
    score=score,
  )
  checkpoints.wait()


def names(directory) -> set[str]:
  return {path.name for path in directory.iterdir()}


def test_the_newest_and_the_best_are_kept(tmp_path):
  """H1: evaluations 0.5, 0.9, 0.6, 0.7; the files on disk agree."""
  checkpoints = Checkpoints(tmp_path, keep=2)
  seen = []
  for step, score in enumerate([0.5, 0.9, 0.6, 0.7], start=1):
    save(checkpoints, step, score=score)
    seen.append(set(checkpoints.steps()))
    assert names(tmp_path) == {str(step) for step in seen[-1]}
  assert seen == [{1}, {1, 2}, {2, 3}, {2, 4}]


def test_without_scores_the_newest_are_kept(tmp_path):
  """H1: no evaluation ever ran."""
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step in (1, 2, 3, 10):
    save(checkpoints, step)
  assert checkpoints.steps() == [3, 10]


def test_a_run_started_again_still_knows_the_best(tmp_path):
  save(Checkpoints(tmp_path, keep=2), 1, score=0.9)
  for step in (2, 3):
    save(Checkpoints(tmp_path, keep=2), step, score=0.1)
  save(Checkpoints(tmp_path, keep=2), 4)  # not evaluated
  assert Checkpoints(tmp_path).steps() == [1, 4]


def test_of_equal_scores_the_newer_is_best(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step, score in [(1, 0.5), (2, 0.5), (3, 0.1), (4, 0.1)]:
    save(checkpoints, step, score=score)
  assert checkpoints.steps() == [2, 4]


def test_keep_one_keeps_the_newest(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=1)
  save(checkpoints, 1, score=0.9)
  save(checkpoints, 2, score=0.1)
  assert checkpoints.steps() == [2]
  with pytest.raises(ValueError, match='keep: 0'):
    Checkpoints(tmp_path, keep=0)


def test_control_and_pending_come_back_exactly(tmp_path):
  control = {
    'seed': 2**63 + 1,
    'draw': -(2**53) - 1,
    'lambda': 0.1 + 0.2,
    'small': 5e-324,
    'inf': float('inf'),
    'none': None,
    'on': True,
    'p': [[0.1, 1], []],
    'ü': 'a\n"b"\u2028',
  }
  pending = [{'tokens': [1, 2, 3], 'logps': [float(np.float32(-0.1))]}]
  save(Checkpoints(tmp_path), 3, control=control, pending=pending)
  step, _, got, got_pending = Checkpoints(tmp_path).restore(like(state_of(3)))
  assert (step, got, got_pending) == (3, control, pending)
  assert type(got['p'][0][1]) is int and got['on'] is True


def test_arrays_of_the_controllers_come_back_as_they_were(tmp_path):
  """Every dtype, empty ones, nested; beside JSON that looks a little like them."""
  control = {
    'a': {'b': [np.arange(5, dtype=np.int8), {'c': np.zeros((2, 0), np.uint16)}]},
    'd': np.array([0.1, np.nan, -np.inf]),
    'e': {'array0': 'array0'},
  }
  save(Checkpoints(tmp_path), 1, control=control)
  _, _, got, _ = Checkpoints(tmp_path).restore(like(state_of(1)))
  for found, expected in (
    (got['a']['b'][0], control['a']['b'][0]),
    (got['a']['b'][1]['c'], control['a']['b'][1]['c']),
    (got['d'], control['d']),
  ):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
  assert got['e'] == control['e']


@pytest.mark.parametrize(
  'control, message',
  [
    ({'naps': {3: 1}}, r'control\.naps: key 3, expected a string'),
    ({'a': [1, np.float32(2)]}, r'control\.a\.1: float32'),
    ({'a': (1, 2)}, r'control\.a: tuple'),
    ({'a': np.array([None])}, r'control\.a: ndarray'),
    ({'a': {'__array__': 'x'}}, r"control\.a: key '__array__'"),
  ],
)
def test_what_json_would_change_is_refused(tmp_path, control, message):
  checkpoints = Checkpoints(tmp_path)
  with pytest.raises(ValueError, match=message):
    save(checkpoints, 1, control=control)
  assert names(tmp_path) == set()


def test_what_is_changed_after_saving_is_saved_as_it_was(tmp_path):
  """Arrays are donated, and controllers go on, while the writing is under way."""
  checkpoints = Checkpoints(tmp_path, keep=3)
  at = mesh(2, 4)
  values = [np.full((512, 1024), i, np.float32) for i in range(16)]
  state = {str(i): jax.device_put(x, on(at, 'data')) for i, x in enumerate(values)}
  specs = like(state)
  control = {'n': [0]}
  add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
  for step in range(3):
    control['n'][0] = step
    checkpoints.save(step, state, control=control, pending=[], score=None)
    control['n'][0] = -1
    donated, state = state, jax.block_until_ready(add(state))
    for x in donated.values():
      x.delete()  # on CPU a buffer that is being read outlives its donation
  for step in range(3):
    _, got, got_control, _ = checkpoints.restore(specs, step=step)
    assert_same(got, {str(i): x + step for i, x in enumerate(values)})
    assert got_control == {'n': [step]}


def test_neither_saving_nor_restoring_compiles_anything(tmp_path):
  """Promise 3: the counter of compilations stands still at a checkpoint."""
  compiled = []

  def count(event, seconds, **_):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(seconds)

  at = mesh(2, 4)
  state = {'cut': state_of(1, on_mesh=at), 'whole': jax.device_put(np.ones(64), on(at))}
  checkpoints = Checkpoints(tmp_path)
  jax.monitoring.register_event_duration_secs_listener(count)
  jax.jit(lambda x: x + 1)(np.ones(3))
  assert len(compiled) == 1  # the counter counts
  save(checkpoints, 1, state=state)
  checkpoints.restore(like(state))
  assert len(compiled) == 1


def adamw():
  return optax.adamw(optax.linear_schedule(1e-2, 0.0, 8), weight_decay=0.1)


@jax.jit
def update(params, moments):
  grads = jax.grad(lambda p: sum(jnp.sum(jnp.sin(x) ** 2) for x in p.values()))(params)
  updates, moments = adamw().update(grads, moments, params)
  return optax.apply_updates(params, updates), moments


@pytest.mark.parametrize('shape', [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_restores_on_another_mesh_and_goes_on(tmp_path, shape):
  """H2: saved on 2x4, restored on 1, 2, 4 and 4x2. H5: moments and schedule too."""
  rng = np.random.default_rng(0)
  values = {n: rng.normal(size=(8, 16)).astype(np.float32) for n in ('a', 'b')}

  def start(at: Mesh):
    params = jax.device_put(values, on(at, 'data', 'model'))
    return params, adamw().init(params)

  state = start(mesh(2, 4))
  for _ in range(3):
    state = update(*state)
  save(Checkpoints(tmp_path), 3, state=state)

  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape,
      x.dtype,
      sharding=on(mesh(*shape), *(('data', 'model') if x.ndim else ())),
    ),
    start(mesh(*shape)),
  )
  _, got, _, _ = Checkpoints(tmp_path).restore(target)
  assert_same(got, state)
  for x, spec in zip(jax.tree.leaves(got), jax.tree.leaves(target), strict=True):
    assert x.sharding == spec.sharding
  assert all(np.all(np.asarray(x) > 0) for x in got[1][0].nu.values())

  straight, resumed = update(*state), update(*got)
  assert int(resumed[1][0].count) == 4
  for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(straight), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-6)


def damage_truncate(file):
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_empty(file):
  file.write_bytes(b'')


def damage_flip(file):
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def damage_last(file):
  content = bytearray(file.read_bytes())
  content[-1] ^= 128
  file.write_bytes(content)


@pytest.mark.parametrize(
  'damage',
  [damage_truncate, damage_empty, damage_flip, damage_last, pathlib.Path.unlink],
)
def test_no_damage_to_any_file_is_loaded(tmp_path, damage):
  """Each file in turn: the step before is restored, or no byte of this one differs."""
  whole = tmp_path / 'whole'
  checkpoints = Checkpoints(whole)
  for step in (1, 2):
    save(checkpoints, step)
  files = [p.relative_to(whole) for p in (whole / '2').rglob('*') if p.is_file()]
  passed_over = 0
  for i, file in enumerate(files):
    broken = tmp_path / str(i)
    shutil.copytree(whole, broken)
    damage(broken / file)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      step, state, control, _ = Checkpoints(broken).restore(like(state_of(1)))
    assert_same(state, state_of(step))
    assert control == {'step': step}
    if step == 1:
      passed_over += 1
      assert any(f'{broken}/2 is damaged' in str(w.message) for w in caught)
      assert names(broken) == {'1', '2.damaged'}
  # Two of them are notes that orbax makes after the manifest, and nothing reads.
  unread = {'_CHECKPOINT_METADATA', 'commit_success.txt'} & {p.name for p in files}
  assert passed_over == len([p for p in files if len(p.parts) > 2]) + 4
  assert len(files) - passed_over == len(unread)


def test_a_damaged_step_does_not_block_a_later_save_of_it(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  for step in (1, 2):
    save(checkpoints, step)
  for _ in range(2):
    damage_truncate(tmp_path / '2' / 'control.json')
    with pytest.warns(UserWarning, match='2 is damaged: control.json has'):
      assert checkpoints.restore(like(state_of(1)))[0] == 1
    save(checkpoints, 2)
    assert checkpoints.restore(like(state_of(1)))[0] == 2
  damage_truncate(tmp_path / '2' / 'control.json')
  with pytest.warns(UserWarning, match='damaged-3'):
    save(checkpoints, 2)  # without a restore between
  assert checkpoints.steps() == [1, 2]


def test_a_step_asked_for_is_whole_or_an_error(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  specs = like(state_of(1))
  assert checkpoints.restore(specs) is None
  with pytest.raises(ValueError, match='No checkpoint .*/5; there are: none'):
    checkpoints.restore(specs, step=5)
  for step in (1, 2):
    save(checkpoints, step)
  assert checkpoints.restore(specs, step=1)[0] == 1
  with pytest.raises(ValueError, match='No checkpoint .*/5; there are: 1, 2'):
    checkpoints.restore(specs, step=5)
  damage_truncate(tmp_path / '2' / 'pending.json')
  with pytest.raises(ValueError, match='/2 is damaged: pending.json .*; whole ones: 1'):
    checkpoints.restore(specs, step=2)
  assert names(tmp_path) == {'1', '2'}


def test_where_all_are_damaged_there_is_none(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  for step in (1, 2):
    save(checkpoints, step)
    damage_empty(tmp_path / str(step) / 'manifest.json')
  assert checkpoints.steps() == []
  with pytest.warns(UserWarning, match='manifest.json cannot be read'):
    assert checkpoints.restore(like(state_of(1))) is None
  assert names(tmp_path) == {'1.damaged', '2.damaged'}


def test_read_only_changes_nothing(tmp_path):
  save(Checkpoints(tmp_path), 1)
  (tmp_path / '2.orbax-checkpoint-tmp').mkdir()
  reader = Checkpoints(tmp_path, read_only=True)
  assert reader.steps() == [1]
  assert_same(reader.restore(like(state_of(1)))[1], state_of(1))
  with pytest.raises(ValueError, match='read only'):
    save(reader, 2)
  damage_truncate(tmp_path / '1' / 'control.json')
  with pytest.raises(ValueError, match='/1 is damaged'):
    reader.restore(like(state_of(1)))
  assert names(tmp_path) == {'1', '2.orbax-checkpoint-tmp'}
  absent = Checkpoints(tmp_path / 'absent', read_only=True)
  assert absent.restore(like(state_of(1))) is None
  assert not (tmp_path / 'absent').exists()


def test_only_what_a_killed_run_left_is_cleaned(tmp_path):
  for name in (
    '7.orbax-checkpoint-tmp',
    'notes',
    'x.orbax-checkpoint-tmp',
    '3.damaged',
  ):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'file').write_text('')
  checkpoints = Checkpoints(tmp_path)
  assert names(tmp_path) == {'notes', 'x.orbax-checkpoint-tmp', '3.damaged'}
  assert checkpoints.steps() == []


def test_another_model_is_refused_by_name(tmp_path):
  """H7: never a mixture; what differs is listed."""
  saved = {'layers': 2, 'heads': 4, 'rope': {'theta': 1e4}, 'tied': None}
  save(Checkpoints(tmp_path, model=saved), 1)
  specs = like(state_of(1))
  assert Checkpoints(tmp_path, model=saved).restore(specs)[0] == 1
  assert Checkpoints(tmp_path).restore(specs)[0] == 1
  other = {'layers': 2, 'heads': 8, 'rope': {'theta': 1e6}, 'tied': True}
  with pytest.raises(ValueError) as error:
    Checkpoints(tmp_path, model=other).restore(specs)
  assert str(error.value).endswith(
    '/1 is of another model: heads: saved 4, expected 8; rope.theta: saved 10000.0,'
    ' expected 1000000.0; tied: saved nothing, expected True'
  )
  assert names(tmp_path) == {'1'}


def test_other_arrays_are_refused_by_path(tmp_path):
  save(Checkpoints(tmp_path), 1)
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])

  def refused(change) -> str:
    specs = like(state_of(1))
    change(specs)
    with pytest.raises(ValueError) as error:
      Checkpoints(tmp_path).restore(specs)
    return str(error.value)

  def spec(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

  def reshape(s):
    s['params']['layers'][0] = spec((16, 8), jnp.float32)

  def recast(s):
    s['params']['norm'] = spec((16,), jnp.float32)

  assert 'params.layers.0: saved float32[8, 16], expected float32[16, 8]' in refused(
    reshape
  )
  assert 'params.norm: saved bfloat16[16], expected float32[16]' in refused(recast)
  assert 'step: saved int32[], expected nothing' in refused(lambda s: s.pop('step'))
  assert 'new: saved nothing, expected float32[2]' in refused(
    lambda s: s.update(new=spec((2,), jnp.float32))
  )
  specs = like(state_of(1))
  specs['step'] = jax.ShapeDtypeStruct((), jnp.int32)
  with pytest.raises(ValueError, match='State step: no sharding'):
    Checkpoints(tmp_path).restore(specs)


def test_a_part_is_read_when_it_is_asked_for(tmp_path):
  """An export has no use for the optimizer's state."""
  save(Checkpoints(tmp_path), 1)
  part = {'params': {'norm': like(state_of(1))['params']['norm']}}
  _, got, control, _ = Checkpoints(tmp_path).restore(part, step=1, partly=True)
  assert_same(got, {'params': {'norm': state_of(1)['params']['norm']}})
  assert control == {'step': 1}
  with pytest.raises(ValueError, match='params.layers.0: saved float32.8, 16., expect'):
    Checkpoints(tmp_path).restore(part)
  part['new'] = part['params']['norm']
  with pytest.raises(ValueError, match='new: saved nothing, expected bfloat16'):
    Checkpoints(tmp_path).restore(part, partly=True)


def test_what_cannot_be_saved_is_refused(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  with pytest.raises(ValueError, match='State a.b: ndarray, expected jax.Array'):
    save(checkpoints, 1, state={'a': {'b': np.ones(2)}})
  with pytest.raises(ValueError, match='Score of step 1: nan'):
    save(checkpoints, 1, score=float('nan'))
  assert names(tmp_path) == set()


def test_a_step_saved_twice_stays_as_it_is(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  save(checkpoints, 1)
  save(checkpoints, 1, control={'other': 1})
  assert checkpoints.restore(like(state_of(1)))[2] == {'step': 1}


def run(code: str, *arguments) -> subprocess.Popen:
  head = f'import sys; sys.path[:0] = {[str(ROOT), str(ROOT / "tests/device")]!r}\n'
  return subprocess.Popen(
    [sys.executable, '-c', head + code, *map(str, arguments)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


FULL_DISK = """
import resource
from test_checkpoint import Checkpoints, state_of
checkpoints = Checkpoints(sys.argv[1], keep=1)
big = 40_000  # rows of 64 bytes
checkpoints.save(1, state_of(1, rows=big), control={}, pending=[], score=None)
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))
checkpoints.save(2, state_of(2, rows=big), control={}, pending=[], score=None)
if sys.argv[2] == 'save':
  checkpoints.save(3, state_of(3, rows=big), control={}, pending=[], score=None)
else:
  getattr(checkpoints, sys.argv[2])()
print('went on')
"""

FULL_FOR_A_WHILE = (
  FULL_DISK.split('if sys')[0]
  + """
try:
  checkpoints.wait()
except RuntimeError:
  resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
  checkpoints.save(3, state_of(3, rows=big), control={}, pending=[], score=None)
  checkpoints.close()
  print(checkpoints.steps())
"""
)


@pytest.mark.parametrize('after', ['save', 'wait', 'close'])
def test_a_full_disk_is_loud_and_spares_the_last_checkpoint(tmp_path, after):
  """H6: even with keep=1; nothing is left that counts as complete."""
  process = run(FULL_DISK, tmp_path, after)
  output, errors = process.communicate(timeout=60)
  assert process.returncode != 0
  assert 'went on' not in output
  assert f'SaveError: Checkpoint {tmp_path}/2 could not be saved' in errors
  assert Checkpoints(tmp_path, read_only=True).steps() == [1]
  expected = state_of(1, rows=40_000)
  step, state, _, _ = Checkpoints(tmp_path).restore(like(expected))
  assert names(tmp_path) == {'1'}  # the half of a step is gone
  assert step == 1
  assert_same(state, expected)


def test_once_there_is_room_again_saving_goes_on(tmp_path):
  output, errors = run(FULL_FOR_A_WHILE, tmp_path).communicate(timeout=60)
  assert output == '[3]\n', errors
  expected = state_of(3, rows=40_000)
  assert_same(Checkpoints(tmp_path).restore(like(expected))[1], expected)


SAVE_FOR_EVER = """
import itertools
from test_checkpoint import Checkpoints, like, state_of
checkpoints = Checkpoints(sys.argv[1], keep=2)
found = checkpoints.restore(like(state_of(0, rows=20_000)))
for step in itertools.count(found[0] + 1 if found else 1):
  state = state_of(step, rows=20_000)
  checkpoints.save(step, state, control={'step': step}, pending=[], score=None)
  checkpoints.wait()
  print(step, flush=True)
"""


def test_killed_at_any_instant_the_newest_whole_one_is_restored(tmp_path):
  """Promise 6: kill -9 while saving, several times over in one directory."""
  rng = random.Random(0)
  specs = like(state_of(0, rows=20_000))
  last = 0
  for _ in range(4):
    process = run(SAVE_FOR_EVER, tmp_path)
    told = process.stdout.readline()
    assert told, process.stderr.read()
    time.sleep(rng.uniform(0.0, 0.5))
    process.kill()
    rest, _ = process.communicate()
    committed = int((told + rest).split()[-1])
    assert committed > last
    step, state, control, _ = Checkpoints(tmp_path).restore(specs)
    assert step in (committed, committed + 1)
    assert_same(state, state_of(step, rows=20_000))
    assert control == {'step': step}
    assert all(name.isdecimal() for name in names(tmp_path))
    last = step


def test_the_manifest_names_every_file_of_the_state(tmp_path):
  save(Checkpoints(tmp_path, model={'layers': 1}), 1, score=0.5)
  manifest = json.loads((tmp_path / '1' / 'manifest.json').read_text())['manifest']
  assert manifest['score'] == 0.5
  assert manifest['arrays']['params.layers.0'] == 'float32[8, 16]'
  state = {
    f'state/{p.relative_to(tmp_path / "1" / "state").as_posix()}'
    for p in (tmp_path / '1' / 'state').rglob('*')
    if p.is_file()
  }
  small = {'control.json', 'control.npz', 'pending.json'}
  assert set(manifest['files']) == state | small
