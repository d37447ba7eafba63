"""What the learner promises: one gradient however the answers are laid out.

Expected gradients come from plain log-softmax over one answer at a time, from
arithmetic on paper, or from identities.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from jaxrl_sched.device import learner as learning
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model
from jaxrl_sched.device.learner import Learner, Loss, make_optimizer
from jaxrl_sched.host import packing
from jaxrl_sched.host.advantages import group_advantages
from jaxrl_sched.types import Batch

ADAM = dict(learning_rate=1e-2, steps=100)
T = 40  # tokens a row
LENGTHS = ((3, 7, 1, 5), (9, 2), (4, 11))  # of the answers; prompts have 3 tokens
PLAIN = Loss(kind='dapo', tis_cap=None)  # the plain policy gradient for fresh answers


def build(parameters, config=toys.CONFIG, *, loss=PLAIN, rows=8, **change) -> Learner:
  how = dict(row_tokens=T, optimizer=ADAM) | change
  return Learner(parameters, config, rows=rows, loss=loss, **how)


def groups_of(lengths=LENGTHS, *, known=toys.CONFIG.known_tokens):
  """Groups of versions 1 and 0 in turn, their advantages and token weights."""
  rng = np.random.default_rng(0)
  groups = [
    toys.group(rng, draw, n, version=(draw + 1) % 2, known=known)
    for draw, n in enumerate(lengths)
  ]
  advantages = [group_advantages(g.rewards) for g in groups]
  weights = packing.answer_weights(
    [g.lengths for g in groups], averaging='sequence', max_new_tokens=16
  )
  return groups, advantages, weights


def filled(groups, advantages, weights, *, rows=8, row_tokens=T, window=64):
  return packing.fill(
    groups,
    advantages,
    weights,
    version=1,
    rows=rows,
    row_tokens=row_tokens,
    window=window,
  )


def singles(groups, advantages, weights):
  """The same answers, each a group by itself."""
  return [
    (dataclasses.replace(g, completions=(c,)), a[k : k + 1], w[k : k + 1])
    for g, a, w in zip(groups, advantages, weights, strict=True)
    for k, c in enumerate(g.completions)
  ]


def stack(batches, rows=8) -> Batch:
  """Microbatches on top of each other, and empty rows."""
  batches = [*batches, empty(rows - sum(len(b.tokens) for b in batches))]
  return Batch(
    **{
      f.name: np.concatenate([getattr(b, f.name) for b in batches])
      for f in dataclasses.fields(Batch)
    }
  )


def unpacked(data) -> list[Batch]:
  """A microbatch of one row for each answer."""
  return [filled([g], [a], [w], rows=1)[0] for g, a, w in singles(*data) if w[0] > 0]


def empty(rows) -> Batch:
  zero = np.zeros((rows, T))
  types = dict(tokens='i4', segments='i4', positions='i4', fresh='?')
  return Batch(
    **{f.name: zero.astype(types.get(f.name, 'f4')) for f in dataclasses.fields(Batch)}
  )


def assert_close(found, expected, *, relative=1e-5):
  """Trees, each array to this fraction of its largest entry."""

  def one(path, a, b):
    np.testing.assert_allclose(
      a,
      b,
      rtol=relative,
      atol=relative * np.abs(b).max(),
      err_msg=jax.tree_util.keystr(path),
    )

  assert any(np.any(x) for x in jax.tree.leaves(expected))  # not nothing to nothing
  jax.tree_util.tree_map_with_path(one, jax.device_get(found), jax.device_get(expected))


def assert_identical(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope='module')
def parameters():
  return toys.parameters(sharpness=5.0)


@pytest.fixture(scope='module')
def data():
  return groups_of()


@pytest.fixture(scope='module')
def full():
  """All terms at work: clips, truncated importance, answers of two versions."""
  return Loss(kind='dapo', tis_cap=2.0, dual_clip=3.0)


@pytest.fixture(scope='module')
def learner(parameters, full):
  return build(parameters, loss=full)


@pytest.fixture(scope='module')
def whole(learner, data):
  """Gradient and sums of all 8 answers, a row each, in one microbatch."""
  return learner.gradient([stack(unpacked(data))])


# --- one gradient, however the answers are laid out ------------------------------


def test_packed_answers_teach_what_unpacked_ones_do(learner, data, whole):
  (packed,) = filled(*data)
  assert packing.density([packed]) > 0.2 and (packed.segments.max(1) > 2).any()
  gradient, sums = learner.gradient([packed])
  assert_close(gradient, whole[0])
  assert_close(sums, whole[1])


@pytest.mark.parametrize('count', [2, 4, 8])
def test_accumulation_changes_no_gradient(learner, data, whole, count):
  """A5: 1, 2, 4 and 8 microbatches, all of one shape, of the same 8 answers."""
  rows = unpacked(data)
  assert len(rows) == 8
  each = 8 // count
  parts = [stack(rows[i : i + each]) for i in range(0, 8, each)]
  gradient, sums = learner.gradient(parts)
  assert_close(gradient, whole[0])
  assert_close(sums, whole[1])


def test_the_order_of_answers_changes_no_gradient(learner, data, whole):
  order = np.random.default_rng(1).permutation(8)
  rows = unpacked(data)
  gradient, _ = learner.gradient([stack([rows[i] for i in order])])
  assert_close(gradient, whole[0])
  backwards = singles(*data)[::-1]
  gradient, _ = learner.gradient(filled(*zip(*backwards, strict=True)))
  assert_close(gradient, whole[0])


def test_padding_rows_change_no_gradient(learner, data, whole):
  """J3: an empty row gives 0, not nan, also a whole microbatch of them."""
  gradient, sums = learner.gradient([empty(8), stack(unpacked(data)), empty(8)])
  assert_close(gradient, whole[0])
  assert_close(sums, whole[1])
  gradient, sums = learner.gradient([empty(8)])
  for x in jax.tree.leaves((gradient, sums)):
    assert not np.any(x)


def rows_of(data, wanted):
  """The answers packed into this many rows."""
  singly = singles(*data)
  share = -(-len(singly) // wanted)
  parts = [
    filled(*zip(*singly[i : i + share], strict=True), rows=1)
    for i in range(0, len(singly), share)
  ]
  assert [len(p) for p in parts] == [1] * wanted
  return stack([p[0] for p in parts])


@pytest.mark.parametrize('count', [2, 3, 8])
def test_the_number_of_rows_has_no_say(learner, data, whole, count):
  """J3: the same 8 answers in 2, 3 or 8 rows."""
  gradient, sums = learner.gradient([rows_of(data, count)])
  assert_close(gradient, whole[0])
  assert_close(sums, whole[1])


@pytest.mark.parametrize(
  'shape',
  [dict(data=8), dict(data=2, fsdp=2, model=2), dict(fsdp=2, sequence=2, model=2)],
)
def test_eight_devices_find_the_gradient_of_one(parameters, full, data, whole, shape):
  """J3: packed into few rows, so that some devices have empty rows only.

  With a sequence axis answers lie across two devices' halves of a row.
  """
  mesh = meshes.make_mesh(**shape)
  spread = build(parameters, loss=full, mesh=mesh)
  (packed,) = filled(*data)
  assert not packed.segments[4:].any()
  gradient, sums = spread.gradient([packed])
  assert_close(gradient, whole[0])
  assert_close(sums, whole[1])


def test_an_answer_without_tokens_hides_nothing_of_its_neighbours(learner):
  """J1: completions of 3, 0 and 2 tokens: 5 scored positions, sums as unpacked."""
  data = groups_of([(3, 0, 2)])
  (packed,) = filled(*data)
  gradient, sums = learner.gradient([packed])
  assert sums['tokens'] == 5
  apart, apart_sums = learner.gradient([stack(unpacked(data))])
  assert_close(gradient, apart)
  assert_close(sums, apart_sums)


def test_gspo_sees_answers_and_not_rows(parameters, data):
  """The loss that needs to know which tokens belong together."""
  learner = build(parameters, loss=Loss(kind='gspo', clip_low=0.5, clip_high=0.5))
  gradient, sums = learner.gradient(filled(*data))
  apart, apart_sums = learner.gradient([stack(unpacked(data))])
  assert_close(gradient, apart)
  assert_close(sums, apart_sums)


# --- against plain arithmetic ------------------------------------------------------


def plain_logps(parameters, config, prompt, answer, temperature=1.0):
  """Of one answer, by whole rows and log-softmax; rows padded to one length."""
  row = np.zeros((1, T), np.int32)
  row[0, : len(prompt) + len(answer)] = np.concatenate([prompt, answer])
  logits = model.logits(parameters, config, row)[0] / temperature
  logps = jax.nn.log_softmax(logits, axis=-1)
  before = len(prompt) - 1 + np.arange(len(answer))
  return logps[before, answer]


def fresh(data):
  """All answers of the weights that are trained."""
  groups = [
    dataclasses.replace(
      g,
      completions=tuple(dataclasses.replace(c, version=1) for c in g.completions),
    )
    for g in data[0]
  ]
  return groups, *data[1:]


@jax.jit
@jax.value_and_grad
def plain_objective(parameters, rows):
  """Minus the sum of weight x advantage x log p; an answer a row."""
  logits = model.logits(parameters, toys.CONFIG, rows['tokens'])[:, :-1]
  targets = rows['tokens'][:, 1:, None]
  logps = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, axis=-1)[..., 0]
  return -jnp.sum((rows['weights'] * rows['advantages'])[:, 1:] * logps)


@pytest.fixture(scope='module')
def policy_gradient(parameters):
  return build(parameters)


def test_fresh_answers_give_the_plain_policy_gradient(
  policy_gradient, parameters, data
):
  data = fresh(data)
  gradient, _ = policy_gradient.gradient(filled(*data))
  _, plain = plain_objective(parameters, vars(stack(unpacked(data))))
  assert_close(gradient, plain, relative=1e-4)


def test_supervised_learning_is_advantage_one(policy_gradient, parameters, data):
  """The gradient of minus the mean log-likelihood of the tokens."""
  groups, _, _ = fresh(data)
  tokens = sum(g.lengths.sum() for g in groups)
  each = lambda x: [np.full(g.size, x) for g in groups]  # noqa: E731
  data = groups, each(1.0), each(1 / tokens)
  gradient, sums = policy_gradient.gradient(filled(*data))
  value, plain = plain_objective(parameters, vars(stack(unpacked(data))))
  assert_close(gradient, plain, relative=1e-4)
  assert sums['tokens'] == tokens
  # At the current weights r is 1: the loss reads -1, its slope is the likelihood's.
  np.testing.assert_allclose(sums['loss'], -1.0, rtol=1e-5)
  assert value > 1.0


def test_log_probs_stand_at_their_own_tokens(parameters, data):
  """B3, packed: entry t is of the token at t, given what its segment has before."""
  (batch,) = filled(*data)
  apart = stack(unpacked(data))

  @functools.partial(jax.jit, static_argnums=1)
  def both(parameters, temperature):
    packed, _ = learning.answer_logps(
      parameters, toys.CONFIG, vars(batch), temperature=temperature
    )
    logits = model.logits(parameters, toys.CONFIG, apart.tokens) / temperature
    return packed, jax.nn.log_softmax(logits)

  for temperature in (1.0, 0.7):
    logps, plain = both(parameters, temperature)
    assert not np.any(logps[:, 0])
    found = 0
    for tokens, trained, of in zip(apart.tokens, apart.weights > 0, plain, strict=True):
      at = np.flatnonzero(trained)
      row, start = place(batch, tokens[: at[-1] + 1])
      expected = of[at - 1, tokens[at]]
      np.testing.assert_allclose(logps[row, start + at], expected, atol=1e-4)
      found += len(at)
    assert found == sum(map(sum, LENGTHS))


def place(batch, tokens):
  """Row and first column of the segment that holds these tokens."""
  for row, segments in enumerate(batch.segments):
    for segment in range(1, segments.max() + 1):
      at = np.flatnonzero(segments == segment)
      if np.array_equal(batch.tokens[row, at], tokens):
        return row, at[0]
  raise AssertionError('not packed')


def test_the_tied_embedding_feels_both_its_uses(policy_gradient, parameters, data):
  """I1's gradient: that of the look-up plus that of the head."""
  config = dataclasses.replace(toys.CONFIG, tied=False)
  untied = build(parameters | dict(head=parameters['embed']), config)
  batches = filled(*data)
  apart, _ = untied.gradient(batches)
  tied, _ = policy_gradient.gradient(batches)
  both = apart | dict(embed=apart['embed'] + apart['head'])
  del both['head']
  assert_close(tied, both)


# --- updates -----------------------------------------------------------------------


def table_data():
  return fresh(groups_of([(3, 5), (4, 2)], known=16))


@pytest.fixture(scope='module')
def table():
  return toys.table(np.random.default_rng(0).normal(size=(16, 16)))


def test_a_gradient_that_is_not_finite_is_refused_whole(table):
  """Counted; parameters, moments and step count bit-identical; then on as if not."""
  good = filled(*table_data())
  spoilt = good[0].advantages.copy()
  spoilt[good[0].weights > 0] *= np.where(np.arange(14) == 5, np.nan, 1)
  bad = [dataclasses.replace(good[0], advantages=spoilt)]
  spared, learner = build(table, toys.TABLE), build(table, toys.TABLE)

  for one in (learner, spared):
    assert one.update(good)['update/refused'] == 0.0
  before = jax.device_get(learner.state)
  metrics = learner.update(bad)
  assert metrics['update/refused'] == 1.0
  assert_identical(jax.device_get(learner.state), before)
  # One bad microbatch among good ones is enough.
  assert learner.update(good + bad)['update/refused'] == 1.0
  assert_identical(jax.device_get(learner.state), before)

  assert learner.update(good)['update/refused'] == 0.0
  spared.update(good)
  assert_identical(jax.device_get(learner.state), jax.device_get(spared.state))


def test_a_gradient_of_zero_moves_nothing(table):
  """No momentum or decay: not with advantages of 0, and not where every token is
  clipped."""
  good = filled(*table_data())
  learner = build(table, toys.TABLE)
  assert learner.update(good)['update/skipped'] == 0.0
  before = jax.device_get(learner.state)
  none = np.zeros_like(good[0].advantages)
  # Of an older policy, that gave these tokens e^-3 of today's chance: far above the clip.
  clipped = dict(
    advantages=np.abs(good[0].advantages) + 1,
    fresh=np.zeros_like(good[0].fresh),
    logps=np.where(good[0].weights > 0, -30.0, 0).astype('float32'),
  )
  for change in (dict(advantages=none), clipped):
    metrics = learner.update([dataclasses.replace(good[0], **change)])
    assert metrics['grad_norm'] == 0 == metrics['update/refused']
    assert metrics['update/skipped'] == 1.0
    assert_identical(jax.device_get(learner.state), before)


@pytest.mark.parametrize('shape', [(1, 1, 1), (2, 2, 2)])
def test_warm_up_compiles_the_update_and_changes_nothing(table, shape):
  mesh = meshes.make_mesh(**dict(zip(('data', 'fsdp', 'model'), shape, strict=True)))
  learner = build(table, toys.TABLE, mesh=mesh)
  before = jax.device_get(learner.state)
  with toys.compilations() as seen:
    learner.warm_up()
  assert seen  # so the counter counts
  assert_identical(jax.device_get(learner.state), before)
  batches = filled(*table_data())
  with toys.compilations() as seen:
    for count in (1, 2, 5):
      metrics = learner.update(batches * count)
  assert not seen
  assert np.isfinite([float(x) for x in metrics.values()]).all()
  assert int(optax.tree_utils.tree_get(learner.state, 'count', filtering=adam)) == 3


def adam(path, _):
  return 'ScaleByAdamState' in str(path[-1])


def test_the_weights_that_were_given_stay_the_givers(table):
  learner = build(table, toys.TABLE)
  given = jax.device_get(table)
  learner.update(filled(*table_data()))
  assert_identical(jax.device_get(table), given)
  assert np.any(learner.parameters['head'] != given['head'])


def test_small_steps_move_the_masters_though_the_computation_is_in_bfloat16():
  """A9: 1,000 steps of 1e-6 take 1.0 to 0.9989867 and 0.02 to about 0.019."""
  config = dataclasses.replace(toys.TABLE, dtype='bfloat16')
  start = jax.device_get(model.init(config, 0))
  start['head'] = np.sign(start['head']) * np.float32(0.02)
  learner = build(
    start,
    config,
    rows=1,
    optimizer=dict(learning_rate=1e-6, steps=1000, max_grad_norm=None),
  )
  (batch,) = filled(*fresh(groups_of([(6, 6)], known=16)), rows=1)
  for _ in range(1000):
    metrics = learner.update([batch])
  assert metrics['update/refused'] == 0.0
  end = jax.device_get(learner.parameters)
  assert {x.dtype for x in jax.tree.leaves(end)} == {np.dtype('float32')}
  # Adam moves by the learning rate a step; some entries are pushed down all the way.
  lowest = np.sort(end['norm']['scale'])[:3]
  np.testing.assert_allclose(lowest, 0.9989867, atol=5e-6)
  lowest = np.sort(np.abs(end['head']), axis=None)[:20]
  np.testing.assert_allclose(lowest, 0.019, atol=3e-5)


def test_kl_pulls_towards_the_reference():
  """A7: log pi -1.5 below log pi_ref -1.2, A = 0; a step must raise log pi."""

  def weights(logp):
    rest = np.log1p(-np.exp(logp))
    return toys.table(np.array([[rest, logp], [0, 0]]))

  one = {k: v.copy() for k, v in vars(empty(1)).items()}
  one['tokens'][0, :2] = [0, 1]
  one['segments'][0, :2] = 1
  one['positions'][0, :2] = [0, 1]
  one['weights'][0, 1] = 1.0
  one['logps'][0, 1] = -1.5
  one['fresh'][0, 1] = True
  batch = Batch(**one)

  def moved(beta):  # a learner whose reference has -1.2 and whose policy -1.5
    learner = build(weights(-1.2), toys.TABLE, loss=Loss(kl_coef=beta), rows=1)
    at = jax.tree.map(lambda x: x.sharding, learner.like()['parameters'])
    policy = jax.device_put(weights(-1.5), at)
    learner.state = learner.state | dict(parameters=policy)
    return learner

  for beta, value in [(0.0, 0.0), (0.4, 0.0199435)]:
    learner = moved(beta)
    gradient, sums = learner.gradient([batch])
    np.testing.assert_allclose(sums['loss'], value, atol=2e-7)
    assert np.any(gradient['head']) == (beta > 0)

  def logp():
    return plain_logps(learner.parameters, toys.TABLE, [0], np.array([1]))[0]

  np.testing.assert_allclose(logp(), -1.5, atol=1e-5)
  metrics = learner.update([batch])
  np.testing.assert_allclose(metrics['kl'], 0.0498588, atol=1e-5)
  assert -1.5 < logp() < -1.2


def test_the_gap_between_sampler_and_learner_is_reported(table):
  """Of fresh answers: 0.25 at one token of 14 that have the learner's own log-probs."""
  learner = build(table, toys.TABLE)
  (batch,) = filled(*table_data())
  own, _ = learning.answer_logps(learner.parameters, toys.TABLE, vars(batch))
  logps = np.where(batch.weights > 0, own, 0.0)
  metrics = learner.update([dataclasses.replace(batch, logps=logps)])
  assert metrics['mismatch/logp_abs_max'] < 1e-4
  np.testing.assert_allclose(metrics['mismatch/tis_raw_mean'], 1.0, atol=1e-4)

  own, _ = learning.answer_logps(learner.parameters, toys.TABLE, vars(batch))
  logps = np.where(batch.weights > 0, own, 0.0)
  logps[tuple(np.argwhere(batch.weights > 0)[3])] -= 0.25
  metrics = learner.update([dataclasses.replace(batch, logps=logps)])
  np.testing.assert_allclose(metrics['mismatch/logp_abs_max'], 0.25, atol=1e-4)
  np.testing.assert_allclose(metrics['mismatch/logp_abs_mean'], 0.25 / 14, atol=1e-4)


def test_settings_that_do_not_fit_are_refused(table):
  mesh = meshes.make_mesh(data=2, fsdp=2)
  with pytest.raises(ValueError, match=r'learner.rows: 6, .*data \* fsdp = 4'):
    build(table, toys.TABLE, mesh=mesh, rows=6)
  with pytest.raises(ValueError, match='learner.rows: 0'):
    build(table, toys.TABLE, rows=0)
  with pytest.raises(ValueError, match='learner.temperature: 0.0, expected above 0'):
    build(table, toys.TABLE, temperature=0.0)


# --- the optimizer -----------------------------------------------------------------


def rates(*steps, **how):
  _, rate = make_optimizer(learning_rate=2.0, **how)
  return [float(rate(s)) for s in steps]


def test_the_learning_rate_warms_up_and_ends_as_said():
  """From 1/4 of the peak in the first update straight to the peak after 4."""
  warm = rates(0, 1, 2, 3, 4, 50, warmup_steps=4, steps=100)
  np.testing.assert_allclose(warm, [0.5, 0.875, 1.25, 1.625, 2, 2])
  ends = dict(warmup_steps=20, steps=100, final_fraction=0.1)
  np.testing.assert_allclose(
    rates(0, 20, 60, 100, 200, schedule='linear', **ends),
    [0.1, 2.0, 1.1, 0.2, 0.2],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    rates(0, 20, 40, 60, 100, 200, schedule='cosine', **ends),
    [0.1, 2.0, 0.2 + 0.9 * (1 + 0.5**0.5), 1.1, 0.2, 0.2],
    rtol=1e-6,
  )
  np.testing.assert_allclose(rates(0, 7, 1000, steps=10), 2.0)


def test_updates_are_those_of_adamw_and_the_schedule_counts_steps(table):
  """optax.adamw counts updates: given the rates of the steps in which they are made, it
  makes the same weights, with its own count of them in the bias correction."""
  how = dict(learning_rate=0.1, steps=10, schedule='linear', final_fraction=0.0)
  made = (0, 1, 4, 9)  # what lies between was skipped
  rates_ = [0.1 * (1 - step / 10) for step in made]
  learner = build(table, toys.TABLE, optimizer=how | {'weight_decay': 0.1})
  batches = filled(*table_data())
  before = jax.device_get(learner.state['parameters'])

  def decays(tree):
    return jax.tree_util.tree_map_with_path(lambda p, _: p[-1].key != 'scale', tree)

  adamw = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      lambda count: jnp.asarray(rates_)[count],
      b1=0.9,
      b2=0.95,
      weight_decay=0.1,
      mask=decays,
    ),
  )
  expected, state = before, adamw.init(before)
  for step, rate in zip(made, rates_, strict=True):
    gradient, _ = jax.device_get(learner.gradient(batches))
    changes, state = adamw.update(gradient, state, expected)
    expected = optax.apply_updates(expected, changes)
    found = float(learner.update(batches, step=step)['lr'])
    assert found == pytest.approx(rate, rel=1e-6)
    assert_close(jax.device_get(learner.state['parameters']), jax.device_get(expected))


def test_weight_decay_spares_norms_and_biases():
  config = dataclasses.replace(
    toys.TABLE,
    vocab_size=8,
    known_tokens=8,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
  )
  before = jax.tree.map(jnp.ones_like, model.init(config, 0))
  adamw, rate = make_optimizer(learning_rate=0.01, steps=10, weight_decay=0.1)
  zero = jax.tree.map(jnp.zeros_like, before)
  changes, _ = jax.jit(adamw.update)(zero, adamw.init(before), before)
  changes = jax.tree.map(lambda change: -rate(0) * change, changes)
  after = jax.device_get(optax.apply_updates(before, changes))
  attn = after['blocks']['attn']
  spared = [
    *(attn[x] for x in ('q_bias', 'k_bias', 'v_bias', 'o_bias')),
    *(after['blocks']['mlp'][x] for x in ('gate_bias', 'up_bias', 'down_bias')),
    *(attn[x]['scale'] for x in ('q_norm', 'k_norm')),
    *(after['blocks'][x]['scale'] for x in ('attn_norm', 'mlp_norm')),
    after['norm']['scale'],
  ]
  shrunk = [
    *(attn[x] for x in 'qkvo'),
    *(after['blocks']['mlp'][x] for x in ('gate', 'up', 'down')),
    after['embed'],
    after['head'],
  ]
  assert len(spared) + len(shrunk) == len(jax.tree.leaves(after))
  for x in spared:
    np.testing.assert_array_equal(x, 1.0)
  for x in shrunk:
    np.testing.assert_allclose(x, 1 - 0.01 * 0.1, rtol=1e-6)


def test_the_gradient_is_clipped_by_its_global_norm():
  """[3, 4] and [12] have norm 13: at most 6.5 halves both, 20 leaves both."""
  gradient = dict(a=jnp.array([3.0, 4.0]), b=jnp.array([12.0]))

  def moments(limit):  # the first is (1 - b1) times the clipped gradient
    adamw, _ = make_optimizer(learning_rate=1.0, steps=10, b1=0.9, max_grad_norm=limit)
    _, state = adamw.update(gradient, adamw.init(gradient), gradient)
    return optax.tree_utils.tree_get(state, 'mu')

  for limit, factor in [(6.5, 0.05), (20.0, 0.1), (None, 0.1)]:
    assert_close(moments(limit), jax.tree.map(lambda g, f=factor: f * g, gradient))


@pytest.mark.parametrize(
  'change, complaint',
  [
    (dict(schedule='cosin'), "schedule: 'cosin', expected one of constant, linear"),
    (dict(learning_rate=-1.0), 'learning_rate=-1.0'),
    (dict(warmup_steps=-1), 'warmup_steps=-1'),
    (dict(weight_decay=-0.1), 'weight_decay=-0.1'),
    (dict(max_grad_norm=0.0), 'max_grad_norm: 0.0, expected above 0'),
  ],
)
def test_bad_optimizer_settings_are_refused(change, complaint):
  with pytest.raises(ValueError, match=complaint):
    make_optimizer(**(ADAM | change))
