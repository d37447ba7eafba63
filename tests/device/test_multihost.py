"""Two processes of two CPU devices each: what they agree on, and how they fail."""

import jax
import numpy as np
import processes
import pytest

from jaxrl_sched.device import multihost
from jaxrl_sched.device.checkpoint import Checkpoints

# Each process prints one JSON object of what it saw.
PROGRAM = """
import time
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxrl_sched.device import multihost
from jaxrl_sched.device.checkpoint import Checkpoints

seen = {}

def failing(call, *args, **kwargs):
  try:
    return 'no error', repr(call(*args, **kwargs))
  except Exception as error:
    return type(error).__name__, str(error)

def raises(error):
  raise error

seen['who'] = [multihost.index(), multihost.count(), multihost.is_first()]
seen['plan'] = multihost.agree(lambda: {'from': me, 'ids': [3, 1, 2]})
big = np.random.default_rng(me).integers(0, 256, 700_000, np.uint8)
got = multihost.agree(lambda: big, name='big')
seen['big'] = [int(x) for x in (len(got), got.sum())]
sizes = [len(x) for x in multihost.gather(lambda: b'x' * (10 if me else 600_000))]
seen['gather'] = [multihost.gather(lambda: (me, None)), sizes]

compiled = []
jax.monitoring.register_event_duration_secs_listener(
  lambda event, s, **_: compiled.append(s) if 'backend_compile' in event else None
)
for size in (1, 300_000, 2_000_000):
  multihost.agree(lambda: b'x' * size)
  multihost.gather(lambda: b'x' * size)
seen['compiled'] = len(compiled)

seen['bug'] = failing(multihost.agree, lambda: raises(KeyError('no prompt')))
seen['bad input'] = failing(multihost.agree, lambda: raises(ValueError('key: 3')))
seen['one fails'] = failing(
  multihost.gather, lambda: raises(OSError('disk')) if me else 'fine'
)
seen['after'] = multihost.agree(lambda: 'still together')

# State over both processes, saved and restored to other shardings.
devices = np.array(jax.devices())
cut = NamedSharding(Mesh(devices.reshape(2, 2), ('a', 'b')), P('a', 'b'))
turned = NamedSharding(Mesh(devices.reshape(4, 1), ('a', 'b')), P('b', 'a'))
whole = NamedSharding(Mesh(devices, ('a',)), P())

def spread(value, sharding):
  return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

values = {'w': np.arange(64, dtype=np.float32).reshape(8, 8), 'n': np.int32(7)}
del compiled[:]
checkpoints = Checkpoints(given, keep=1)
for step in (1, 2):
  state = {'w': spread(values['w'] * step, cut), 'n': spread(values['n'], whole)}
  checkpoints.save(step, state, control={'step': step}, pending=[me], score=None)
checkpoints.wait()
like = {
  name: jax.ShapeDtypeStruct(values[name].shape, values[name].dtype, sharding=sharding)
  for name, sharding in [('w', turned), ('n', whole)]
}
step, state, control, pending = checkpoints.restore(like)
seen['restored'] = [step, control, pending, checkpoints.steps()]
seen['equal'] = all(
  bool(np.array_equal(shard.data, 2 * values['w'][shard.index]))
  for shard in state['w'].addressable_shards
) and state['w'].sharding == turned
seen['compiled by checkpoints'] = len(compiled)
seen['no such step'] = failing(checkpoints.restore, like, step=9)
checkpoints.close()

# All controllers, decided on process 0 and applied on both; then one hears otherwise.
sys.path[:0] = [f'{sys.argv[3]}/tests', f'{sys.argv[3]}/tests/control']
import test_together
from jaxrl_sched.control.base import digest

everything = test_together.Methods(
  factor=2.0, sagc='by prompt', lengths=True, prompts='fill', answers='fixed'
)
scheduler, seen['states'] = everything.scheduler(), []

def alike():
  state = scheduler.state_dict()
  return multihost.compare("the controllers' state", lambda: digest(state), name='6')

for step in range(6):
  while plan := multihost.agree(lambda: scheduler.plan(step)):
    scheduler.sent(plan)
    groups = [test_together.answered(r, step) for r in plan.requests]
    scheduler.observe(groups[::-1] if me and step == 5 else groups)
  scheduler.take_batch(step)
  scheduler.close(step)
  seen['states'].append(failing(alike))
seen['steps drawn'] = scheduler.state_dict()['draw']

# K2: five prompts, two a batch; what process 0 answers teaches, what process 1 does not.
from toys import graded

few = test_together.plain(
  {'a': 5}, groups_per_step=2, group_size=2, dynamic_sampling=True, max_rounds=3
)
seen['uneven'] = dict(rounds=0, answered=0, trained=[], fates=[])
for step in range(4):
  while plan := multihost.agree(lambda: few.plan(step)):
    few.sent(plan)
    mine = plan.requests[me::2]
    parts = multihost.gather(lambda: [graded(r, [1, me], version=step) for r in mine])
    few.observe(sorted(sum(parts, []), key=lambda group: group.request.draw))
    seen['uneven']['rounds'] += 1
    seen['uneven']['answered'] += len(mine)
  seen['uneven']['trained'].append(len(few.take_batch(step).groups))
  _, lines = few.close(step)
  seen['uneven']['fates'] += [[line['prompt_id'], line['fate']] for line in lines]
seen['uneven']['pending'] = len(few.pending())

# K1: a late process is waited for; one that is somewhere else is named.
if me:
  time.sleep(2)
multihost.barrier('late')
seen['mismatch'] = failing(multihost.agree, lambda: 1, name=f'plan {me}', timeout_s=2)
print(json.dumps(seen), flush=True)
multihost.barrier('end')
"""


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """What each process saw, and the directory of their checkpoints."""
  directory = tmp_path_factory.mktemp('checkpoints')
  return processes.both(PROGRAM, directory), directory


@pytest.fixture
def seen(run):
  return run[0]


def test_each_knows_its_place(seen):
  assert [s['who'] for s in seen] == [[0, 2, True], [1, 2, False]]


def test_both_get_the_plan_of_process_0(seen):
  assert [s['plan'] for s in seen] == [{'from': 0, 'ids': [3, 1, 2]}] * 2


def test_a_plan_of_any_size_arrives_whole(seen):
  big = np.random.default_rng(0).integers(0, 256, 700_000, np.uint8)
  assert [s['big'] for s in seen] == [[700_000, int(big.sum())]] * 2


def test_both_get_what_each_has_in_process_order(seen):
  assert [s['gather'] for s in seen] == [[[[0, None], [1, None]], [600_000, 10]]] * 2


def test_sizes_compile_nothing(seen):
  """Promise 3: after the first use, whatever the size."""
  assert [s['compiled'] for s in seen] == [0, 0]


def test_both_raise_when_process_0_fails(seen):
  assert seen[0]['bug'] == ['KeyError', "'no prompt'"]
  assert seen[1]['bug'] == ['RuntimeError', "Process 0 failed: KeyError: 'no prompt'"]


def test_bad_input_is_bad_input_everywhere(seen):
  assert seen[0]['bad input'] == ['ValueError', 'key: 3']
  assert seen[1]['bad input'] == ['ValueError', 'Process 0 failed: ValueError: key: 3']


def test_both_raise_when_one_fails_and_can_go_on(seen):
  assert seen[0]['one fails'] == ['RuntimeError', 'Process 1 failed: OSError: disk']
  assert seen[1]['one fails'] == ['OSError', 'disk']
  assert [s['after'] for s in seen] == ['still together'] * 2


def test_controllers_are_compared_and_a_difference_stops_both(seen):
  """Promise 4: decisions of process 0, applied by both, leave equal states; where one
  has taken in something else, both end with a clear message."""
  assert seen[0]['steps drawn'] == seen[1]['steps drawn'] > 30
  for found in (s['states'] for s in seen):
    assert found[:5] == [['no error', 'None']] * 5
    kind, message = found[5]
    assert kind == 'RuntimeError'
    assert message.startswith(
      "the controllers' state differs on process 1 from that on process 0 (6): "
    )


def test_hosts_with_different_numbers_of_useful_groups_stay_together(seen):
  """K2: as many collective steps on both, one filter for all, no prompt lost."""
  first, second = (dict(s['uneven']) for s in seen)
  answered = first.pop('answered') + second.pop('answered')
  assert first == second
  fates = [fate for _, fate in first['fates']]
  assert answered == len(fates) + first['pending']
  assert {name for name, _ in first['fates']} == {f'a/{i}' for i in range(5)}
  assert fates.count('trained') == sum(first['trained']) > 0
  assert fates.count('filtered') > 0


def test_who_is_late_is_waited_for_and_who_is_absent_is_named(seen):
  """K1."""
  assert [s['mismatch'] for s in seen] == [
    [
      'TimeoutError',
      f"Barrier 'plan {me}': absent after 2 s: process {1 - me}"
      f' (this is process {me} of 2)',
    ]
    for me in (0, 1)
  ]


def test_a_checkpoint_of_two_processes_is_one(run):
  """H2, over processes; control and pending are those of process 0."""
  seen, directory = run
  assert [s['restored'] for s in seen] == [[2, {'step': 2}, [0], [2]]] * 2
  assert [s['equal'] for s in seen] == [True, True]
  assert [s['compiled by checkpoints'] for s in seen] == [0, 0]
  for s in seen:
    kind, text = s['no such step']
    assert kind == 'ValueError' and text.endswith('/9; there are: 2')

  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = {
    'w': jax.ShapeDtypeStruct((8, 8), np.float32, sharding=one),
    'n': jax.ShapeDtypeStruct((), np.int32, sharding=one),
  }
  step, state, _, _ = Checkpoints(directory, read_only=True).restore(like)
  assert step == 2
  np.testing.assert_array_equal(
    state['w'], 2 * np.arange(64, dtype=np.float32).reshape(8, 8)
  )


def test_alone_nothing_is_wrapped():
  assert multihost.agree(lambda: 3) == 3
  assert multihost.gather(lambda: 3) == [3]
  multihost.barrier('alone')
  with pytest.raises(KeyError):
    multihost.agree(lambda: {}['x'])
