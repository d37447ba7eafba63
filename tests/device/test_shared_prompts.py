"""A prompt stored once teaches what it teaches when stored before every answer.

What is expected comes from rows in which each answer has a prompt of its own.
"""

import dataclasses
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from jaxrl_sched import config as configs
from jaxrl_sched.device import learner as learning
from jaxrl_sched.device import losses
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.learner import Learner, Loss
from jaxrl_sched.device.lora import Lora
from jaxrl_sched.host import packing
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.types import Lesson

SMOKE = str(pathlib.Path(__file__).parents[2] / 'configs' / 'smoke.py')
ROOM = dict(version=1, rows=4, row_tokens=40, window=4)
ADAM = dict(learning_rate=1e-2, steps=100)
# Prompts of 12 and 5 tokens in turn. Of the third group's answers one is dropped, the
# others need its prompt twice; of the last group nothing is left.
LENGTHS = (
  (3, 7, 1, 5),
  (9, 2),
  (13, 4, 20, 6, 11),
  (8,),
  (5, 2, 4, 6, 2, 3, 7, 2),
  (3, 3),
)
DROPPED = ((), (), (1,), (), (0,), (0, 1))


def groups_of(lengths=LENGTHS, dropped=DROPPED, averaging='sequence'):
  """Groups of versions 1 and 0 in turn, their advantages and token weights."""
  rng = np.random.default_rng(0)
  groups = [
    toys.group(rng, q, n, prompt_length=5 if q % 2 else 12, version=(q + 1) % 2)
    for q, n in enumerate(lengths)
  ]
  keep = [np.ones(len(n)) for n in lengths]
  for k, gone in zip(keep, dropped, strict=True):
    k[list(gone)] = 0
  weights = packing.answer_weights(
    [g.lengths for g in groups], averaging=averaging, max_new_tokens=20, keep=keep
  )
  return groups, [group_advantages(g.rewards) for g in groups], weights


def both(data):
  """The same answers, their prompts stored before each of them and shared."""
  apart, shared = (packing.fill(*data, **ROOM, share_prompt=s) for s in (False, True))
  assert len(apart) > len(shared) > 1 and not shared[-1].segments[-1].any()
  assert max(b.segments.max() for b in shared) > 1  # a row has several prompts
  return apart, shared


def relative(found, expected):
  """The largest difference of two trees' arrays, in terms of the array's largest."""

  def one(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)

  assert any(np.any(x) for x in jax.tree.leaves(expected))  # not nothing to nothing
  return max(jax.tree.leaves(jax.tree.map(one, found, expected)))


@pytest.fixture(scope='module')
def parameters():
  return toys.parameters(sharpness=5.0)


@functools.partial(jax.jit, static_argnames='temperature')
def scored(parameters, batch, temperature=1.0):
  return learning.answer_logps(parameters, toys.CONFIG, batch, temperature=temperature)


def by_answer(batches, scores):
  """{tokens of an answer: its scores [length] each}; all answers are different."""
  found = {}
  for batch, (logps, entropies) in zip(batches, scores, strict=True):
    numbers = vars(batch).get('answers', batch.segments * (batch.weights > 0))
    for b, k in itertools.product(range(len(numbers)), range(1, numbers.max() + 1)):
      at = b, numbers[b] == k
      if np.any(at[1]):
        key = tuple(batch.tokens[at].tolist())
        assert key not in found
        found[key] = np.stack([logps[at], entropies[at]])
  return found


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_an_answer_is_as_likely_as_with_a_prompt_of_its_own(parameters, temperature):
  """Its first token, too, which stands behind another answer."""
  apart, shared = (
    by_answer(b, [scored(parameters, vars(x), temperature=temperature) for x in b])
    for b in both(groups_of())
  )
  assert shared.keys() == apart.keys() and len(apart) == 18
  for key, expected in apart.items():
    assert expected[0].min() < -1  # not all of them sure
    np.testing.assert_allclose(shared[key], expected, atol=1e-5, rtol=1e-5)


def total(learner, batches):
  """Gradient and sums of all microbatches, added up on the host."""
  parts = [jax.device_get(learner.gradient([batch])) for batch in batches]
  found = jax.tree.map(lambda *x: np.sum(x, axis=0, dtype=np.float64), *parts)
  found[1]['gap_max'] = max(sums['gap_max'] for _, sums in parts)
  return found


def taught(loss, parameters, data, **how):
  """`total` from prompts apart and shared."""
  how = dict(rows=ROOM['rows'], row_tokens=ROOM['row_tokens'], optimizer=ADAM) | how
  learner = Learner(parameters, how.pop('config', toys.CONFIG), loss=loss, **how)
  # Away from the reference, so that there is a divergence.
  moved = jax.tree.map(
    lambda x: x + 0.05 * jnp.cos(jnp.arange(x.size, dtype='float32')).reshape(x.shape),
    learner.state['parameters'],
  )
  learner.state = learner.state | dict(parameters=moved)
  return [total(learner, batches) for batches in both(data)]


@pytest.mark.parametrize('kind', losses.KINDS)
def test_loss_and_gradient_are_those_of_prompts_apart(kind, parameters):
  """Unequal groups, some answers dropped, several microbatches, KL and clips on."""
  loss = Loss(
    kind=kind, kl_coef=0.5, tis_cap=0.05, dual_clip=None if kind == 'cispo' else 3.0
  )
  data = groups_of(averaging=packing.AVERAGING[kind])
  (expected, sums), (found, others) = taught(loss, parameters, data)
  assert 0 < sums['clip_frac'] < sums['tokens'] and sums['kl'] > 1
  assert 0 < sums['fresh'] < sums['tokens'] and sums['tis'] < sums['tis_raw']
  assert relative(found, expected) < 1e-5
  assert relative(others, sums) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
  'how',
  [
    dict(mesh=dict(data=2, fsdp=2, model=2)),
    dict(config=dataclasses.replace(toys.CONFIG, lora=Lora(rank=2)), remat=True),
  ],
  ids=['mesh', 'adapters and remat'],
)
def test_meshes_adapters_and_remat_change_nothing_in_that(how, parameters):
  how = how | ({'mesh': meshes.make_mesh(**how['mesh'])} if 'mesh' in how else {})
  loss = Loss(kind='gspo', kl_coef=0.5)
  (expected, sums), (found, others) = taught(loss, parameters, groups_of(), **how)
  assert relative(found, expected) < 1e-5
  assert relative(others, sums) < 1e-5


def test_no_answer_sees_another(parameters):
  """Other tokens in one answer change nothing in its neighbours: not the last bit."""
  data = groups_of(LENGTHS[:1], DROPPED[:1])
  (batch,) = packing.fill(*data, **ROOM, share_prompt=True)
  before = [np.asarray(x) for x in scored(parameters, vars(batch))]
  answers = batch.answers[0]
  assert answers.max() == 4
  for k in range(1, 5):
    tokens = batch.tokens.copy()
    tokens[0, answers == k] = (tokens[0, answers == k] + 7) % toys.CONFIG.known_tokens
    after = scored(parameters, vars(batch) | dict(tokens=tokens))
    for x, y in zip(before, after, strict=True):
      others = (answers != k) & (answers > 0)
      np.testing.assert_array_equal(np.asarray(y)[0, others], x[0, others])
    assert np.all(np.asarray(after[0])[0, answers == k] != before[0][0, answers == k])
  tokens = batch.tokens.copy()
  tokens[0, 0] += 1  # of the prompt: every answer sees it
  after = np.asarray(scored(parameters, vars(batch) | dict(tokens=tokens))[0])
  assert np.all(after[0, answers > 0] != before[0][0, answers > 0])


def test_what_is_kept_decides_no_shape(parameters):
  shape = dict(rows=ROOM['rows'], row_tokens=ROOM['row_tokens'])
  learner = Learner(parameters, toys.CONFIG, loss=Loss(), optimizer=ADAM, **shape)
  learner.warm_up(share_prompt=True)
  kept = [DROPPED, [()] * 6, [(0,)] * 6, [(0, 1), (0,), (0, 1, 2), (), *[(0, 1)] * 2]]
  batches = [
    packing.fill(*groups_of(dropped=d), **ROOM, share_prompt=True) for d in kept
  ]
  assert {len(b) for b in batches} == {1, 2}
  with toys.compilations() as seen:
    for some in batches:
      metrics = learner.update(some)
  assert not seen
  assert float(metrics['update/refused']) == 0.0


def test_the_config_shares_prompts(tmp_path):
  """learner.share_prompt: the same update from fewer rows; warmed up, none compiles."""
  kept = {}
  for share in ('false', 'true'):
    overrides = [('learner.share_prompt', share), ('loss.kl_coef', '0.1')]
    run = configs.prepare(configs.read(SMOKE, overrides))
    assert run.learner.share_prompt == (share == 'true')
    engine = configs.build_engine(run, tmp_path / share)
    rng = np.random.default_rng(0)
    # Prompts of 40 and answers of 5 to 8 tokens, in rows of 128; the first is pruned.
    groups = [
      toys.group(rng, q, rng.integers(5, 9, 6), prompt_length=40, known=250)
      for q in range(8)
    ]
    lesson = Lesson(
      groups=groups,
      advantages=[group_advantages(g.rewards) for g in groups],
      keep=[np.array([0.0, 2, 2, 1, 1, 1])] * 8,
      count=8,
    )
    try:
      if run.learner.share_prompt:
        engine.warm_up(longest_prompt=1)
      kept[share] = jax.device_get(engine.learn(lesson))
    finally:
      engine.close()
  apart, shared = kept['false'], kept['true']
  assert apart['compile/count'] > 0 == shared['compile/count']
  for name in ('loss', 'grad_norm', 'entropy', 'kl', 'clip_frac'):
    assert shared[name] == pytest.approx(apart[name], rel=1e-5), name
  # 40 answers of 45 to 48 tokens, two a row; 8 prompts of 65 to 80 with theirs.
  assert (apart['packing/rows'], shared['packing/rows']) == (20, 8)
