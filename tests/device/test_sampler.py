"""What the sampler promises: the same answer anywhere, the right odds, exact ends.

Expected tokens come from a slow loop over whole rows that shares the noise rule with
the sampler and nothing else, from tables whose odds are known, or from identities.
"""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from jaxrl_sched.device import drawing, model, slots
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.logps import token_logps
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.types import Share

SEED = 3
EOS = 2
LAST = np.float32(1 - 2**-24)  # the largest number below 1
STOPS = (7, 19, 31, 64, 128, 200, 255, 299)


def spell(tokens) -> str:
  """A letter a token: ids that differ by 26 share one."""
  return ''.join(chr(97 + t % 26) for t in tokens)


def zoo() -> list:
  """20 requests, 300 answers; no two settings alike."""
  rng = np.random.default_rng(0)
  sizes = rng.multinomial(300 - 20, np.ones(20) / 20) + 1
  hows = [
    dict(),
    dict(temperature=0.7, top_k=12),
    dict(temperature=1.5, top_p=0.8, stop_strings=('ab', 'xyz')),
    dict(temperature=0.0),
    dict(temperature=1.2, min_new_tokens=4, top_k=200, top_p=0.95),
  ]
  return [
    toys.request(
      draw,
      rng.integers(300, size=1 + draw % 12),
      int(size),
      max_new_tokens=4 + (5 * draw) % 11,
      stop_ids=STOPS[: 1 + draw % 8],
      **hows[draw % 5],
    )
    for draw, size in enumerate(sizes)
  ]


TOP_P = [r.draw for r in zoo() if r.sampling.top_p < 1]


@pytest.fixture(scope='module')
def parameters():
  return toys.parameters()


@pytest.fixture(scope='module')
def plain(parameters):
  return Sampler(
    parameters,
    toys.CONFIG,
    slots=8,
    cache_length=64,
    chunk=4,
    seed=SEED,
    detokenize=spell,
  )


@pytest.fixture(scope='module')
def crowd(plain):
  return plain.generate(zoo())


@pytest.fixture(scope='module')
def warm(parameters):
  """Nothing about it is like `plain`, and all is compiled for prompts up to 40."""
  sampler = Sampler(
    parameters,
    toys.CONFIG,
    slots=13,
    cache_length=100,
    chunk=7,
    seed=SEED,
    prefill_rows=3,
    detokenize=spell,
  )
  with toys.compilations() as seen:
    sampler.warm_up(40)
  assert seen  # so the counter counts
  return sampler


@pytest.fixture(scope='module')
def tables():
  """A sampler for tables, to be loaded by each test."""
  return Sampler(
    toys.table(np.zeros((16, 16))),
    toys.TABLE,
    slots=64,
    cache_length=20,
    chunk=3,
    seed=SEED,
    detokenize=spell,
  )


def assert_same(some, others, *, top_p=()):
  """Equal tokens, log-probs to 1e-5.

  In draws under `top_p` rounding may rarely decide whether one more token is kept,
  and with it the log-probs of that place.
  """
  assert len(some) == len(others)
  rounded = 0
  for a, b in zip(some, others, strict=True):
    where = f'draw {a.draw}, answer {a.answer}'
    assert (a.draw, a.answer, a.finish) == (b.draw, b.answer, b.finish), where
    assert a.tokens.tolist() == b.tokens.tolist(), where
    differ = np.abs(a.logps - b.logps) > 1e-5
    assert a.draw in top_p or not differ.any(), (where, a.logps, b.logps)
    np.testing.assert_allclose(a.logps, b.logps, atol=0.01, err_msg=where)
    rounded += differ.sum()
  assert rounded < 5


# --- the same answer anywhere ---------------------------------------------------


def filtered(z, top_k, top_p):
  """Logits of one token with what top-k, then top-p leaves out at -inf.

  Also whether rounding decides: a token has just top_p before it.
  """
  order = np.argsort(-z, kind='stable')
  if top_k > 0:
    order = order[:top_k]
  p = np.exp(z[order] - z[order[0]])
  p /= p.sum()
  before = np.cumsum(p) - p
  doubtful = top_p < 1 and np.abs(before + 1e-6 - top_p).min() < 2e-6
  if top_p < 1:
    order = order[before < top_p - 1e-6]
  kept = np.full_like(z, -np.inf)
  kept[order] = z[order]
  return kept, doubtful


def inverse_cdf(z, u):
  """Two levels: a block of 128 tokens, then one in it. Float64."""
  mass = np.zeros(-(-len(z) // 128) * 128)
  mass[: len(z)] = np.exp(z - z.max())
  blocks = np.cumsum(mass.reshape(-1, 128).sum(1))
  block = np.searchsorted(blocks, u[0] * blocks[-1], side='right')
  inside = np.cumsum(mass[128 * block : 128 * (block + 1)])
  return 128 * block + np.searchsorted(inside, u[1] * inside[-1], side='right')


def slow_answers(parameters, requests, *, length=32):
  """Each answer by whole rows and plain numpy: [(tokens, log-probs, finish)].

  A log-prob that hangs on the rounding of top-p is nan.
  """
  rows = [(r, k) for r in requests for k in range(r.size)]

  @jax.jit
  @jax.vmap
  def noise(draw, answer):
    key = jax.random.key(SEED, impl='threefry2x32')
    key = jax.random.fold_in(jax.random.fold_in(key, draw), answer)
    keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(length))
    return jax.vmap(lambda k: jax.random.uniform(k, (2,)))(keys)

  noise = np.asarray(
    noise(np.uint32([r.draw for r, _ in rows]), np.uint32([k for _, k in rows]))
  )
  tokens = np.zeros((len(rows), length), np.int32)
  for n, (r, _) in enumerate(rows):
    tokens[n, : len(r.prompt.tokens)] = r.prompt.tokens
  logps, finish = [[] for _ in rows], [None] * len(rows)
  for t in range(max(r.sampling.max_new_tokens for r in requests)):
    logits = np.asarray(model.logits(parameters, toys.CONFIG, tokens), np.float64)
    for n, (r, _) in enumerate(rows):
      if finish[n] is not None:
        continue
      s, start = r.sampling, len(r.prompt.tokens)
      z = logits[n, start + t - 1]
      if t + 1 < s.min_new_tokens:
        z[list(s.stop_ids)] = -np.inf
      if s.temperature == 0:
        token, logp = z.argmax(), 0.0
      else:
        z, doubtful = filtered(z / s.temperature, s.top_k, s.top_p)
        token = inverse_cdf(z, noise[n, t])
        logp = z[token] - z.max() - np.log(np.exp(z - z.max()).sum())
        logp = np.nan if doubtful else logp
      tokens[n, start + t] = token
      logps[n].append(logp)
      text = spell(tokens[n, start : start + t + 1])
      if token in s.stop_ids or any(x in text for x in s.stop_strings):
        finish[n] = 'stop'
      elif t + 1 == s.max_new_tokens:
        finish[n] = 'length'
  return [
    (tokens[n, len(r.prompt.tokens) :][: len(logps[n])], logps[n], finish[n])
    for n, (r, _) in enumerate(rows)
  ]


def test_a_crowd_equals_a_slow_loop_over_whole_rows(parameters, crowd):
  """300 answers in 8 slots; also B3: each log-prob is of its own token."""
  expected = slow_answers(parameters, zoo())
  assert len(crowd) == len(expected) == 300
  doubtful = 0
  for c, (tokens, logps, finish) in zip(crowd, expected, strict=True):
    assert c.tokens.tolist() == tokens.tolist(), (c.draw, c.answer)
    assert c.finish == finish, (c.draw, c.answer)
    known = np.isfinite(logps)
    doubtful += np.sum(~known)
    np.testing.assert_allclose(c.logps[known], np.array(logps)[known], atol=1e-4)
  assert doubtful < 20
  ends = [c.finish for c in crowd]
  assert min(ends.count('stop'), ends.count('length')) > 20  # both were put to test


def test_answers_come_in_request_order(crowd):
  wanted = [(r.draw, k) for r in zoo() for k in range(r.size)]
  assert [(c.draw, c.answer) for c in crowd] == wanted


def test_an_answer_is_the_same_alone_as_in_a_crowd(plain, crowd):
  crowd = {(c.draw, c.answer): c for c in crowd}
  for request in zoo()[::3]:
    alone = plain.generate([dataclasses.replace(request, size=1)])
    assert_same(alone, [crowd[request.draw, 0]], top_p=TOP_P)


def test_slots_and_chunks_and_cache_change_no_answer(warm, crowd):
  crowd = {(c.draw, c.answer): c for c in crowd}
  again = warm.generate(zoo()[::-1])
  assert_same(again, [crowd[c.draw, c.answer] for c in again], top_p=TOP_P)


def test_eight_devices_sample_as_one_does(parameters, crowd):
  sampler = Sampler(
    parameters,
    toys.CONFIG,
    slots=8,
    cache_length=32,
    chunk=5,
    mesh=meshes.make_mesh(data=2, fsdp=2, model=2),
    seed=SEED,
    prefill_rows=4,
    detokenize=spell,
  )
  sampler.warm_up(12)
  requests = [dataclasses.replace(r, size=min(r.size, 5)) for r in zoo()]
  with toys.compilations() as seen:
    spread = sampler.generate(requests)
  assert not seen
  crowd = {(c.draw, c.answer): c for c in crowd}
  assert_same(spread, [crowd[c.draw, c.answer] for c in spread], top_p=TOP_P)


def test_group_members_and_draws_never_share_noise(tables):
  """C3: two hosts, 4 prompts each (two alike), G = 8: 64 distinct answers."""
  tables.load(toys.table(np.zeros((16, 16))), version=0)
  prompts = [[1], [2], [3], [3]]

  def step(first_draw):
    return tables.generate(
      [
        toys.request(first_draw + i, prompts[i % 4], 8, max_new_tokens=16)
        for i in range(8)
      ]
    )

  first, again, second = step(0), step(0), step(8)
  assert_same(first, again)
  assert len({tuple(c.tokens) for c in first + second}) == 128


def test_another_seed_gives_other_answers(tables):
  requests = [toys.request(i, [1], 8, max_new_tokens=16) for i in range(4)]
  uniform = toys.table(np.zeros((16, 16)))
  tables.load(uniform, version=0)
  other = Sampler(
    uniform, toys.TABLE, slots=64, cache_length=20, chunk=3, seed=SEED + 1
  )
  both = tables.generate(requests) + other.generate(requests)
  assert len({tuple(c.tokens) for c in both}) == 64


def test_one_draw_number_for_two_requests_is_refused(tables):
  with pytest.raises(ValueError, match='draw 5 is asked for twice'):
    tables.generate([toys.request(5, [1]), toys.request(5, [2])])


# --- compilations, memory, failures -----------------------------------------------


def test_no_mix_of_requests_compiles_after_warm_up(warm, parameters):
  rng = np.random.default_rng(1)

  def wild(draw):
    return toys.request(
      draw,
      rng.integers(300, size=rng.integers(1, 41)),
      int(rng.integers(1, 20)),
      max_new_tokens=int(rng.integers(4, 61)),
      temperature=float(rng.choice([0, 0.5, 1, 3])),
      top_k=int(rng.choice([-1, 0, 1, 50])),
      top_p=float(rng.choice([1, 0.9])),
      min_new_tokens=int(rng.integers(0, 5)),
      stop_ids=STOPS[: rng.integers(0, 9)],
      stop_strings=('abc', 'q')[: rng.integers(0, 3)],
    )

  with toys.compilations() as seen:
    assert warm.generate([]) == []
    answers = warm.generate([wild(0)])
    warm.load(parameters, version=1)
    answers += warm.generate([wild(draw) for draw in range(1, 25)])
  assert not seen
  assert max(len(c.tokens) for c in answers) > 40
  assert {c.version for c in answers if c.draw > 0} == {1}


def test_the_cache_is_never_copied(parameters):
  sampler = Sampler(parameters, toys.CONFIG, slots=8, cache_length=4096, chunk=4)
  cache, state = sampler._slots._cache, sampler._slots._state
  size = sum(x.nbytes for x in jax.tree.leaves(cache))
  arguments = sampler._weights[0], cache, state, 64
  decode = sampler._slots.programs.decode.lower(*arguments)
  memory = decode.compile().memory_analysis()
  assert memory.alias_size_in_bytes >= size
  assert memory.temp_size_in_bytes < size / 4


def test_the_sampler_lives_on_after_an_error_between_chunks(warm, crowd):
  def give_up():
    raise InterruptedError('enough')

  with toys.compilations() as seen:
    with pytest.raises(InterruptedError, match='enough'):
      warm.generate(zoo(), on_chunk=give_up)
    again = warm.generate(zoo()[:4])
  assert not seen
  assert_same(again, crowd[: len(again)], top_p=TOP_P)


def test_every_answer_is_told_of_once_when_it_ends(tables):
  tables.load(toys.table(np.zeros((16, 16))), version=7)
  told = []
  requests = [
    toys.request(0, [1], 70, stop_ids=(EOS,)),
    toys.request(1, [1], 1, max_new_tokens=1),
  ]
  answers = tables.generate(requests, on_finish=lambda r, c: told.append((r, c)))
  assert len(told) == len(answers) == 71
  assert {(c.draw, c.answer) for _, c in told} == {(c.draw, c.answer) for c in answers}
  assert all(r is requests[c.draw] and c.version == 7 for r, c in told)


def test_a_full_house_is_not_idle(tables):
  tables.load(toys.table(np.zeros((16, 16))), version=0)
  rollout = tables.begin([toys.request(0, [1], 64, max_new_tokens=6)])
  while rollout.advance():
    pass
  assert rollout.busy == rollout.slot_steps == 64 * 6


# --- several versions, several samplers, shares ---------------------------------------


def test_a_rollout_is_sampled_with_the_version_it_names():
  """Version 0 goes 1, 2, 3, ...; version 1 goes 1, 3, 5; 2 is loaded meanwhile."""
  sampler = Sampler(
    toys.table(toys.chain(1, 2, 3, 4, 5)),
    toys.TABLE,
    slots=2,
    cache_length=20,
    chunk=1,
    seed=SEED,
  )
  ask = [toys.request(0, [1], max_new_tokens=3)]
  sampler.load(toys.table(toys.chain(1, 3, 5, 7)), version=1)
  (new,) = sampler.generate(ask)
  rollout = sampler.begin(ask, version=0)
  assert rollout.advance()
  sampler.forget(before=1)
  sampler.load(toys.table(toys.chain(1, 15, 14, 13)), version=2)
  while rollout.advance():
    pass
  old = rollout.completions[0, 0]
  (newest,) = sampler.generate(ask)
  assert (old.tokens.tolist(), old.version) == ([2, 3, 4], 0)
  assert (new.tokens.tolist(), new.version) == ([3, 5, 7], 1)
  assert (newest.tokens.tolist(), newest.version) == ([15, 14, 13], 2)
  with pytest.raises(ValueError, match=r'version=0, expected .* held: \[1, 2\]'):
    sampler.begin(ask, version=0)
  sampler.forget()
  with pytest.raises(ValueError, match=r'version=2, expected .* held: \[\]'):
    sampler.generate(ask)


def test_a_version_outlives_the_arrays_it_was_made_of(plain, crowd):
  """A learner gives its own away to the update that comes next."""
  mine = jax.tree.map(jnp.array, toys.parameters())
  plain.load(mine, version=0)
  jax.tree.map(lambda x: x.delete(), mine)
  assert_same(plain.generate(zoo()[:3]), crowd[: sum(r.size for r in zoo()[:3])])


def test_one_thread_drives_several_samplers(plain, warm, crowd):
  """Each has a share, in an order of its own; together they are all."""
  keys = np.array([(i, k) for i, r in enumerate(zoo()) for k in range(r.size)])
  keys = np.random.default_rng(0).permutation(keys)
  halves = [Share(requests=h[:, 0], answers=h[:, 1]) for h in (keys[:120], keys[120:])]
  both = (plain, warm)
  rollouts = [s.begin(zoo(), share=h) for s, h in zip(both, halves, strict=True)]
  waits, left = 0, rollouts
  while left:
    waits += not all(r.ready() for r in left)
    left = [r for r in left if not r.ready() or r.advance()]
  assert waits > 0  # a chunk was under way, and `advance` had come back
  found = rollouts[0].completions | rollouts[1].completions
  assert len(rollouts[0].completions) == 120 and len(found) == 300
  assert_same([found[c.draw, c.answer] for c in crowd], crowd, top_p=TOP_P)


def test_samplers_and_learner_may_have_devices_of_their_own(parameters, crowd):
  """Weights cut over four devices go to two samplers on two devices each."""
  learner = meshes.make_mesh(fsdp=4)
  shapes, axes = model.abstract(toys.CONFIG)
  at = meshes.parameter_shardings(shapes, axes, learner)
  mine = jax.device_put(parameters, at)
  samplers = [
    Sampler(
      mine,
      toys.CONFIG,
      slots=8,
      cache_length=32,
      chunk=5,
      mesh=meshes.make_mesh(**split, devices=jax.devices()[first:]),
      seed=SEED,
      detokenize=spell,
    )
    for first, split in ((4, dict(data=2)), (6, dict(model=2)))
  ]
  asked = [dataclasses.replace(r, size=min(r.size, 4)) for r in zoo()]
  left = [s.begin(asked[i::2]) for i, s in enumerate(samplers)]
  rollouts = list(left)
  while left:
    left = [r for r in left if not r.ready() or r.advance()]
  found = rollouts[0].completions | rollouts[1].completions
  crowd = [c for c in crowd if c.answer < 4]
  assert_same([found[c.draw, c.answer] for c in crowd], crowd, top_p=TOP_P)


def test_a_prompt_is_prefilled_once_whatever_the_order(plain, crowd, monkeypatch):
  """All first answers, then all second ones: 20 prompts in 3 prefills of 8 rows."""
  rows = []
  prefill = plain._slots.prefill

  def counted(weights, answers):
    rows.append(len(answers))
    return prefill(weights, answers)

  monkeypatch.setattr(plain._slots, 'prefill', counted)
  keys = sorted((k, i) for i, r in enumerate(zoo()) for k in range(r.size))
  ks, places = np.array(keys).T
  rollout = plain.begin(zoo(), share=Share(requests=places, answers=ks))
  while rollout.advance():
    pass
  assert rows == [8, 8, 4]
  assert_same(
    [rollout.completions[c.draw, c.answer] for c in crowd], crowd, top_p=TOP_P
  )


@pytest.mark.parametrize('cuts, steps', [(None, 12), ([0, 2, 4], 15)])
def test_static_minibatches_last_as_long_as_their_longest(tables, cuts, steps):
  """9, 5, 4, 3, 2, 1 tokens in 2 slots: 12 steps with refill, 9 + 4 + 2 in pairs."""
  tokens, flat = [9, 5, 4, 3, 2, 1], toys.table(np.zeros((16, 16)))
  one = Sampler(flat, toys.TABLE, slots=2, cache_length=20, chunk=1, seed=SEED)
  asked = [toys.request(i, [1], max_new_tokens=n) for i, n in enumerate(tokens)]
  share = Share(
    requests=np.arange(6),
    answers=np.zeros(6, int),
    cuts=None if cuts is None else np.array(cuts),
  )
  rollout, chunks = one.begin(asked, share=share), 0
  while rollout.advance():
    chunks += 1
  assert chunks == steps
  assert (rollout.busy, rollout.slot_steps) == (sum(tokens), 2 * steps)
  tables.load(flat, version=0)
  expected = tables.generate(asked)
  assert_same([rollout.completions[i, 0] for i in range(6)], expected)


def test_an_empty_share_is_done_at_once(plain):
  none = np.zeros(0, np.int32)
  for cuts in (None, none):
    rollout = plain.begin(zoo(), share=Share(requests=none, answers=none, cuts=cuts))
    assert rollout.ready() and not rollout.advance()
    assert rollout.done and not rollout.completions and rollout.slot_steps == 0


def test_rollouts_on_a_sampler_come_one_at_a_time(warm, crowd):
  with toys.compilations() as seen:
    rollout = warm.begin(zoo())
    rollout.advance()
    with pytest.raises(ValueError, match='a rollout is under way'):
      warm.begin(zoo())
    rollout.abandon()
    assert not rollout.advance() and not rollout.completions
    again = warm.generate(zoo()[:4])
  assert not seen
  assert_same(again, crowd[: len(again)], top_p=TOP_P)


@pytest.mark.parametrize(
  'requests, answers, cuts, complaint',
  [
    ([0, 0], [0, 0], None, r"answer 0 of prompt 'toy/0', expected one of \[0, 1\]"),
    ([0, 1], [0, 2], None, r"answer 2 of prompt 'toy/1'"),
    ([0, 2], [0, 0], None, 'request 2, expected 0 to 1'),
    ([0, -1], [0, 0], None, 'request -1, expected 0 to 1'),
    ([0, 0], [0, 1], [1], r'cuts=\[1\], expected 0 and then growing'),
    ([0, 0], [0, 1], [], r'cuts=\[\], expected 0 and then growing'),
    ([0, 0, 1], [0, 1, 0], [0, 2, 1], r'cuts=\[0, 2, 1\], expected 0 and then'),
    ([0, 0], [0, 1], [0, 3], r'cuts=\[0, 3\], expected 0 and then growing'),
  ],
)
def test_a_share_that_does_not_fit_is_refused(
  plain, requests, answers, cuts, complaint
):
  share = Share(
    requests=np.array(requests),
    answers=np.array(answers),
    cuts=None if cuts is None else np.array(cuts, int),
  )
  with pytest.raises(ValueError, match=complaint):
    plain.begin([toys.request(0, [1], 2), toys.request(1, [2], 2)], share=share)


def test_a_minibatch_fits_the_slots(plain):
  share = Share(requests=np.zeros(9, int), answers=np.arange(9), cuts=np.array([0]))
  with pytest.raises(ValueError, match='minibatch of 9 answers, .* slots=8'):
    plain.begin([toys.request(0, [1], 9)], share=share)


# --- what is drawn ----------------------------------------------------------------

HALVES = np.log([0.5, 0.3, 0.15, 0.05])
C1 = [  # top_k, top_p, what is left
  (0, 0.6, [0.625, 0.375, 0, 0]),
  (0, 0.8, [0.625, 0.375, 0, 0]),  # exactly reached
  (0, 0.85, [0.5263158, 0.3157895, 0.1578947, 0]),
  (0, 0.9, [0.5263158, 0.3157895, 0.1578947, 0]),
  (0, 0.95, [0.5263158, 0.3157895, 0.1578947, 0]),
  (0, 1.0, [0.5, 0.3, 0.15, 0.05]),
  (0, 1e-9, [1, 0, 0, 0]),
  (2, 1.0, [0.625, 0.375, 0, 0]),
  (3, 0.8, [0.625, 0.375, 0, 0]),  # of the three's mass 0.842 lies in two
  (3, 0.85, [0.5263158, 0.3157895, 0.1578947, 0]),
  (1, 1.0, [1, 0, 0, 0]),
  (99, 1.0, [0.5, 0.3, 0.15, 0.05]),
  (-1, 1.0, [0.5, 0.3, 0.15, 0.05]),
]


@pytest.mark.parametrize('order', [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_top_k_and_top_p_keep_what_they_say(order):
  """C1: neither one token too few nor one too many at the boundary."""
  top_k, top_p, kept = (np.array(x) for x in zip(*C1, strict=True))
  logits = jnp.asarray(np.tile(HALVES[list(order)], (len(C1), 1)), jnp.float32)
  left = drawing.keep_top(logits, np.maximum(top_k, 0), top_p.astype(np.float32))
  np.testing.assert_allclose(
    jax.nn.softmax(left, -1), kept[:, order], atol=1e-6, rtol=1e-5
  )


def test_answers_have_the_odds_and_log_probs_of_what_is_left(tables):
  """C1 and D1 end to end: token 0 under top_p 0.6 was sampled with density 0.625."""
  tables.load(toys.table(np.tile(HALVES, (4, 1))), version=0)
  answers = tables.generate(
    [
      toys.request(i, [0], 64, top_k=top_k, top_p=top_p)
      for i, (top_k, top_p, _) in enumerate(C1)
    ]
  )
  for i, (_, _, kept) in enumerate(C1):
    mine = [c for c in answers if c.draw == i]
    tokens, logps = (np.concatenate([getattr(c, x) for c in mine]) for x in FIELDS)
    kept = np.array(kept)
    np.testing.assert_allclose(np.exp(logps), kept[tokens], rtol=1e-5)
    share = np.bincount(tokens, minlength=4) / len(tokens)
    np.testing.assert_array_less(
      np.abs(share - kept), 4 * np.sqrt(kept * (1 - kept) / 512) + 1e-9
    )


FIELDS = ('tokens', 'logps')


@pytest.mark.parametrize('top_k', [0, -1])
def test_neutral_settings_are_not_greedy(tables, top_k):
  """C2: 4,000 draws of 4 ids at temperature 1: each 1000 +- 110."""
  tables.load(toys.table(np.zeros((4, 4))), version=0)
  answers = tables.generate(
    [toys.request(0, [0], 250, max_new_tokens=16, top_k=top_k, top_p=1.0)]
  )
  counts = np.bincount(np.concatenate([c.tokens for c in answers]), minlength=4)
  assert counts.sum() == 4000
  np.testing.assert_array_less(np.abs(counts - 1000), 110)


def test_temperature_divides_the_logits(tables):
  """Odds of 9 to 1 are 3 to 1 at temperature 2 and 81 to 1 at 0.5."""
  tables.load(toys.table(np.log([[9.0, 1.0], [9.0, 1.0]])), version=0)
  how = {0: 0.5, 1: 1.0, 2: 2.0}
  answers = tables.generate(
    [toys.request(i, [0], 64, temperature=t) for i, t in how.items()]
  )
  for c in answers:
    odds = 9 ** (1 / how[c.draw])
    p = np.array([odds, 1]) / (odds + 1)
    np.testing.assert_allclose(np.exp(c.logps), p[c.tokens], rtol=1e-5)


def chi_square(tokens, p, bins):
  """The chance of a fit this bad, tokens counted in bins."""
  expected = len(tokens) * np.bincount(bins, weights=p)
  counts = np.bincount(bins[tokens], minlength=len(expected))
  assert expected.min() > 5
  x = np.sum((counts - expected) ** 2 / expected)
  return float(jax.scipy.stats.chi2.sf(x, len(expected) - 1))


@pytest.mark.parametrize('size', [300, 50_000])
def test_draws_follow_the_softmax_down_to_rare_tokens(size):
  """Half of the mass lies in tokens that are each rare, also at the very end."""
  rng = np.random.default_rng(size)
  logits = rng.normal(size=size) * 0.5
  common = rng.permutation(size - 100)[:20]
  logits[common] = np.log(np.exp(logits).sum() / 20) + rng.normal(size=20)
  p = np.exp(logits) / np.exp(logits).sum()
  row = jnp.asarray(logits[None], jnp.float32)
  draws = 200_000
  tokens = jax.lax.map(
    lambda u: drawing.pick(row, u[None])[0],
    jax.random.uniform(jax.random.key(0), (draws, 2)),
    batch_size=20_000,
  )
  # A bin: a token, or neighbours in a large vocabulary; common tokens one each.
  bins = np.arange(size) // (1 if size == 300 else 50)
  bins[common] = bins.max() + 1 + np.arange(20)
  _, bins = np.unique(bins, return_inverse=True)
  assert chi_square(np.asarray(tokens), p, bins) > 1e-3


@pytest.mark.parametrize('size', [3, 128, 300, 50_000])
def test_the_ends_of_the_uniform_reach_the_first_and_last_token(size):
  logits = np.full((2, size), model.NEVER, np.float32)
  logits[:, 1 : size - 1] = np.random.default_rng(0).normal(size=size - 2)
  uniform = np.array([[0, 0], [LAST, LAST]], np.float32)
  assert drawing.pick(jnp.asarray(logits), uniform).tolist() == [1, size - 2]


def test_a_token_of_no_mass_is_never_drawn():
  """The uniform aims at every edge of the running sums, where rounding decides."""
  rng = np.random.default_rng(0)
  rows, size = 64, 50_000
  blocks = -(-size // drawing.BLOCK)
  pick = jax.jit(drawing.pick)
  for _ in range(4):
    logits = (4 * rng.normal(size=(rows, size))).astype(np.float32)
    gone = np.repeat(rng.random((rows, blocks)) < 0.5, drawing.BLOCK, axis=1)
    logits[gone[:, :size] | (rng.random((rows, size)) < 0.5)] = model.NEVER
    mass = np.exp(logits - logits.max(-1, keepdims=True))
    mass = np.pad(mass, ((0, 0), (0, -size % drawing.BLOCK)))
    sums = jnp.cumsum(jnp.asarray(mass).reshape(rows, blocks, -1).sum(-1), axis=-1)
    edges = np.asarray(sums / sums[:, -1:])
    for direction in (-1, 0, 1) * 8:
      edge = edges[np.arange(rows), rng.integers(blocks, size=rows)]
      edge = np.nextafter(edge, np.float32(edge + direction))
      second = rng.choice([0, 0.5, LAST], rows)
      uniform = np.stack([np.clip(edge, 0, LAST), second], 1).astype(np.float32)
      tokens = np.asarray(pick(logits, uniform))
      assert tokens.max() < size
      assert logits[np.arange(rows), tokens].min() > model.NEVER


def test_ids_that_no_tokenizer_knows_are_never_drawn(plain):
  """C6: 151,936 rows, 151,665 known ids, T = 5; sampler and learner agree."""
  config = dataclasses.replace(
    toys.CONFIG, vocab_size=151_936, known_tokens=151_665, d_model=2
  )
  hidden, head = jnp.zeros((1, 2, 2)), jnp.zeros((config.vocab_size, 2))
  logits = model.head_logits(hidden[0], head, config)
  last = drawing.pick(logits / 5.0, np.full((2, 2), LAST))
  assert last.tolist() == [151_664] * 2

  state = slots.fresh_state(2, 8) | dict(temperature=np.full(2, 5, np.float32))
  tokens, logps = jax.jit(drawing.draw_tokens)(logits, state)
  np.testing.assert_allclose(logps, -np.log(151_665), atol=1e-5)
  learnt, _ = token_logps(hidden, head, config, tokens[None], temperature=5.0)
  np.testing.assert_allclose(learnt[0], logps, atol=1e-5)

  hot = plain.generate([toys.request(0, [1], 64, max_new_tokens=16, temperature=5.0)])
  tokens = np.concatenate([c.tokens for c in hot])
  assert 280 < tokens.max() < toys.CONFIG.known_tokens


def test_log_probs_are_those_of_whole_rows(plain, parameters):
  """What shows it is done, 6: to 1e-4, at two temperatures."""
  requests = [
    toys.request(0, [5, 6, 7], 6, max_new_tokens=20),
    toys.request(1, [8], 6, max_new_tokens=20, temperature=0.6),
  ]
  for request in requests:
    prompt = request.prompt.tokens
    answers = plain.generate([request])
    rows = np.stack([np.concatenate([prompt, c.tokens]) for c in answers])
    logits = model.logits(parameters, toys.CONFIG, rows)
    logps = jax.nn.log_softmax(logits / request.sampling.temperature, axis=-1)
    own = np.take_along_axis(np.asarray(logps)[:, :-1], rows[:, 1:, None], -1)[..., 0]
    sampled = np.stack([c.logps for c in answers])
    np.testing.assert_allclose(sampled, own[:, len(prompt) - 1 :], atol=1e-4)


def test_a_log_prob_stands_at_its_own_token(tables):
  """B3: log p(completion[j] | all before it), the first from the prompt's last."""
  logits = np.random.default_rng(0).normal(size=(16, 16)) * 2
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  tables.load(toys.table(logits), version=0)
  for c in tables.generate([toys.request(0, [1, 2], 32, stop_ids=(EOS,))]):
    before = np.concatenate([[2], c.tokens[:-1]])
    np.testing.assert_allclose(c.logps, logp[before, c.tokens], atol=1e-4)


def test_greedy_is_the_argmax_of_whole_rows(plain, parameters):
  answers = plain.generate(
    [toys.request(0, [9, 4, 77], 3, temperature=0.0, max_new_tokens=12, top_k=5)]
  )
  row = [9, 4, 77]
  for _ in range(12):
    padded = np.zeros((1, 16), np.int32)
    padded[0, : len(row)] = row
    logits = model.logits(parameters, toys.CONFIG, padded)
    row.append(int(jnp.argmax(logits[0, len(row) - 1])))
  for c in answers:
    assert c.tokens.tolist() == row[3:]
    assert c.finish == 'length'
    assert not c.logps.any()  # drawn from a point


# --- how an answer ends -----------------------------------------------------------


def test_nothing_follows_the_stop_token(tables):
  """C4: 5, EOS, 6, 6, ... is [5, EOS]; a longer neighbour goes on."""
  logits = toys.chain(4, 5, EOS, 6, 6)
  logits += 100 + toys.chain(7, 8, 9, 10, 11, 12, 13, 14, 15)
  tables.load(toys.table(logits), version=0)
  stop, neighbour = tables.generate(
    [toys.request(0, [4], stop_ids=(EOS,)), toys.request(1, [7], stop_ids=(EOS,))]
  )
  assert (stop.tokens.tolist(), stop.finish) == ([5, EOS], 'stop')
  assert len(stop.logps) == 2
  assert neighbour.tokens.tolist() == list(range(8, 16))
  assert neighbour.finish == 'length'


def test_lengths_count_the_first_stop_token_only(tables):
  """B1: a policy that keeps writing EOS gives lengths 2 and 4, mean 3."""
  logits = toys.chain(4, 5, EOS, EOS) + 100 + toys.chain(8, 9, 10, 11, EOS)
  tables.load(toys.table(logits), version=0)
  answers = tables.generate(
    [toys.request(i, [t], stop_ids=(EOS,)) for i, t in enumerate([4, 8])]
  )
  lengths = [len(c.tokens) for c in answers]
  assert lengths == [2, 4] and np.mean(lengths) == 3.0


def test_the_limit_never_makes_up_a_stop_token(tables):
  """B2: [11, 12, 13, 14] stays as sampled; [11, 12, 13, EOS] has ended by itself."""
  ask = [toys.request(0, [10], max_new_tokens=4, stop_ids=(EOS,))]
  tables.load(toys.table(toys.chain(10, 11, 12, 13, 14)), version=0)
  (cut,) = tables.generate(ask)
  assert (cut.tokens.tolist(), cut.finish) == ([11, 12, 13, 14], 'length')
  assert len(cut.logps) == 4
  tables.load(toys.table(toys.chain(10, 11, 12, 13, EOS)), version=0)
  (ended,) = tables.generate(ask)
  assert (ended.tokens.tolist(), ended.finish) == ([11, 12, 13, EOS], 'stop')


def test_any_of_several_stop_ids_ends_an_answer(tables):
  tables.load(toys.table(toys.chain(4, 5, 6, 7, 8, 9, 10, 11, 12)), version=0)
  stops = [(9,), (7, 9), (15, 14, 13, 3, 2, 1, 0, 6), ()]
  answers = tables.generate(
    [toys.request(i, [4], stop_ids=s) for i, s in enumerate(stops)]
  )
  assert [c.tokens[-1] for c in answers] == [9, 7, 6, 12]
  assert [c.finish for c in answers] == ['stop', 'stop', 'stop', 'length']


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_no_answer_is_shorter_than_its_least_length(tables, temperature):
  """Stop ids are forbidden before; log-probs are of what was left to draw from."""
  logits = np.full((16, 16), -100.0)
  logits[:, EOS], logits[:, 6] = 0.0, -9.0
  tables.load(toys.table(logits), version=0)
  how = dict(stop_ids=(EOS, 11), temperature=temperature)
  none, one, three = tables.generate(
    [toys.request(n, [4], min_new_tokens=n, **how) for n in (0, 1, 3)]
  )
  assert none.tokens.tolist() == one.tokens.tolist() == [EOS]
  assert three.tokens.tolist() == [6, 6, EOS]
  np.testing.assert_allclose(three.logps[:2], 0.0, atol=1e-6)
  np.testing.assert_allclose(
    three.logps[2], -np.log1p(np.exp(-9)) if temperature else 0.0, atol=1e-6
  )


def test_a_stop_string_ends_at_the_token_that_completes_it(tables):
  """Across token and chunk boundaries (chunks of 3); what comes later is cut."""
  tables.load(toys.table(toys.chain(*range(16))), version=0)  # 0 -> 'bcdefghi'
  cases = [
    (dict(stop_strings=('b',)), 'b', 'stop'),
    (dict(stop_strings=('cde',)), 'bcde', 'stop'),
    (dict(stop_strings=('zz', 'efg', 'def')), 'bcdef', 'stop'),
    (dict(stop_strings=('bcdefghi',)), 'bcdefghi', 'stop'),  # at the very limit
    (dict(stop_strings=('x',)), 'bcdefghi', 'length'),
    (dict(stop_strings=('cd',), stop_ids=(4,)), 'bcd', 'stop'),  # string first
    (dict(stop_strings=('fg',), stop_ids=(4,)), 'bcde', 'stop'),  # id first
    (dict(stop_strings=('cd',), min_new_tokens=5), 'bcdef', 'stop'),
  ]
  answers = tables.generate(
    [toys.request(i, [0], 20, **how) for i, (how, _, _) in enumerate(cases)]
  )
  assert len(answers) == 20 * len(cases)
  for c in answers:
    _, text, finish = cases[c.draw]
    assert (spell(c.tokens), c.finish) == (text, finish), cases[c.draw]
    assert len(c.logps) == len(c.tokens)


def test_the_cache_holds_prompt_and_answer_or_the_request_is_refused(parameters, plain):
  """C5: refused before generation, with both numbers; full to the brim is right."""
  small, brim = (
    Sampler(parameters, toys.CONFIG, slots=4, cache_length=s, chunk=16, seed=SEED)
    for s in (16, 20)
  )
  prompt = np.arange(100, 112)
  eight = toys.request(0, prompt, 6)
  with pytest.raises(ValueError, match="'toy/0': 12 prompt.*=8.*cache_length=16"):
    small.generate([eight])
  with pytest.raises(ValueError, match="'toy/0': 20 prompt.*=8.*cache_length=16"):
    small.generate([toys.request(0, np.arange(20))])
  answers = brim.generate([eight])
  assert all(len(c.tokens) == 8 for c in answers)
  assert_same(answers, plain.generate([eight]))


@pytest.mark.parametrize(
  'prompt, change, complaint',
  [
    ([1], dict(max_new_tokens=0), 'max_new_tokens=0'),
    ([], {}, '0 prompt tokens'),
    ([1], dict(temperature=-1.0), 'temperature=-1.0'),
    ([1], dict(temperature=float('nan')), 'temperature=nan'),
    ([1], dict(temperature=float('inf')), 'temperature=inf'),
    ([1], dict(top_p=0.0), 'top_p=0.0'),
    ([1], dict(top_p=1.5), 'top_p=1.5'),
    ([1], dict(size=0), 'size=0'),
    ([1], dict(stop_ids=tuple(range(9))), '9 stop ids, at most 8'),
    ([1], dict(min_new_tokens=9), 'min_new_tokens=9'),
  ],
)
def test_a_request_that_cannot_be_sampled_is_refused_by_name(
  tables, prompt, change, complaint
):
  request = toys.request(4, prompt, **change)
  with pytest.raises(ValueError, match=f"prompt 'toy/4': .*{complaint}"):
    tables.generate([toys.request(0, [1]), request])


def test_settings_that_do_not_fit_are_refused(parameters):
  mesh = meshes.make_mesh(data=2, fsdp=2, model=2)

  def build(**change):
    how = dict(slots=8, cache_length=32, chunk=4, prefill_rows=4, mesh=mesh) | change
    return Sampler(parameters, toys.CONFIG, **how)

  for change, complaint in [
    (
      dict(slots=6),
      r'sampler.slots: 6, expected a multiple of data \* fsdp \* sequence = 4',
    ),
    (dict(slots=0), 'sampler.slots: 0'),
    (dict(prefill_rows=2), 'sampler.prefill_rows: 2'),
    (dict(chunk=0), 'chunk=0'),
    (dict(cache_length=1), 'cache_length=1'),
  ]:
    with pytest.raises(ValueError, match=complaint):
      build(**change)
  silent = build()
  with pytest.raises(ValueError, match="'toy/0'.*detokenize"):
    silent.generate([toys.request(0, [1], stop_strings=('a',))])


def test_no_version_outlives_the_rollout_that_it_was_for():
  """3.2: at most lag + 1 versions are held."""
  one = Sampler(toys.parameters(), toys.CONFIG, slots=2, cache_length=32, chunk=4)
  one.generate([toys.request(0, [1, 2])])
  old = [weakref.ref(leaf) for leaf in jax.tree.leaves(one._weights)]
  one.forget(1)
  gc.collect()
  assert all(ref() is None for ref in old)
