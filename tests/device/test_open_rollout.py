"""An engine of the open pool: what ends when, the same tokens whenever it is interrupted,
and every token of the weights that it claims."""

import dataclasses
import json
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from jaxrl_sched.control.planning import Plan
from jaxrl_sched.device import model
from jaxrl_sched.device.marking import Marking
from jaxrl_sched.device.open_pool import OpenPool
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.engine import InFlight, Stopped
from jaxrl_sched.host.grading import GradingPool
from jaxrl_sched.types import Completion, Share
from tests import pools

SLOTS, CHUNK, LIMIT = 4, 3, 20
SAMPLING = dict(max_new_tokens=LIMIT, stop_ids=(7, 19, 31, 64, 128, 200, 255, 299))


def spell(tokens) -> str:
  return ''.join(chr(97 + t % 26) for t in tokens)


def sampler() -> Sampler:
  return Sampler(
    toys.parameters(),
    toys.CONFIG,
    slots=SLOTS,
    cache_length=32,
    chunk=CHUNK,
    seed=3,
    prefill_rows=3,
    detokenize=spell,
  )


@pytest.fixture(scope='module')
def own():
  return sampler()


def requests(count=6, size=3, first=0, **how):
  rng = np.random.default_rng(first)
  return [
    toys.request(draw, rng.integers(300, size=1 + draw % 9), size, **(SAMPLING | how))
    for draw in range(first, first + count)
  ]


def keys_of(asked):
  return [(r.draw, k) for r in asked for k in range(r.size)]


def play(own, asked, *, cuts=(), weights=None, between=lambda: None):
  """All answers of these requests, on one engine that is suspended at these ticks.

  Returns:
    Completions by key, and (tick, draw) of starts and ends.
  """
  engine, found, starts, ends = own.open_rollout(), {}, [], []
  fills = iter(weights or [own.weights(0)] * (len(cuts) + 1))
  engine.begin_fill(next(fills), 0)
  engine.put(asked, keys_of(asked))
  fill = 0
  while engine.clock.queue or engine.clock.running:
    engine.launch()
    started, ended, completions = engine.book()
    starts, ends = starts + started, ends + ended
    found |= {(c.draw, c.answer): c for _, c in completions}
    if engine.clock.tick in cuts:
      partial = engine.suspend()
      assert list(partial) == engine.running()
      between()
      fill += 1
      engine.begin_fill(next(fills), fill if weights else 0)
  engine.suspend()
  return found, starts, ends


@pytest.fixture(scope='module')
def plain(own):
  asked = requests()
  return asked, {(c.draw, c.answer): c for c in own.generate(asked)}


def same(found, expected):
  assert found.keys() == expected.keys()
  for key, c in expected.items():
    np.testing.assert_array_equal(found[key].tokens, c.tokens)
    np.testing.assert_allclose(found[key].logps, c.logps, atol=1e-5)
    assert found[key].finish == c.finish


def test_answers_are_those_of_the_sampler_and_start_and_end_as_the_clock_says(
  own, plain
):
  asked, expected = plain
  found, starts, ends = play(own, asked)
  same(found, expected)
  lengths = [len(expected[key].tokens) for key in keys_of(asked)]
  clock = pools.ends_in_slots(lengths, SLOTS, CHUNK)
  draws = [draw for draw, _ in keys_of(asked)]
  assert starts == [(start, d) for (start, _), d in zip(clock, draws, strict=True)]
  by_clock = [(end, d) for (_, end), d in zip(clock, draws, strict=True)]
  assert sorted(ends) == sorted(by_clock)
  assert len(set(lengths)) > 4  # not all alike


@pytest.mark.parametrize('cuts', [(3,), (3, 6, 9, 12, 15), (6, 24), (30,)])
def test_an_interruption_changes_nothing_while_weights_stay(own, plain, cuts):
  asked, expected = plain

  def evaluate():  # the slots are others' in between
    own.generate(requests(first=50, count=2))

  found, _, ends = play(own, asked, cuts=cuts, between=evaluate)
  same(found, expected)
  assert all(c.earlier == () for c in found.values())  # one version in all
  assert sorted(ends) == sorted(play(own, asked)[2])


def test_stop_strings_and_limits_end_answers_in_the_pool_too(own):
  asked = requests(stop_ids=(), stop_strings=('ab', 'x', 'qq'))
  expected = {(c.draw, c.answer): c for c in own.generate(asked)}
  assert {c.finish for c in expected.values()} == {'stop', 'length'}
  same(play(own, asked, cuts=(6, 9))[0], expected)


def test_every_token_is_of_the_version_that_it_claims(own):
  trees = [toys.parameters(seed=seed) for seed in range(4)]
  other = sampler()
  for version, tree in enumerate(trees):
    other.load(tree, version)
  asked = requests()
  weights = [other.weights(version) for version in range(4)]
  found, _, _ = play(other, asked, cuts=(3, 6, 12), weights=weights)
  by_draw, seen = {r.draw: r for r in asked}, set()
  for (draw, _), c in found.items():
    prompt = by_draw[draw].prompt.tokens
    row = np.concatenate([prompt, c.tokens])[None]
    versions = c.versions
    assert (np.diff(versions) >= 0).all()
    seen.add(tuple(np.unique(versions).tolist()))
    for version in np.unique(versions):
      logits = np.asarray(model.logits(trees[version], toys.CONFIG, row)[0], np.float64)
      logits[:, toys.CONFIG.known_tokens :] = -np.inf
      logp = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1))[:, None]
        - logits.max(-1, keepdims=True)
      )
      places = np.flatnonzero(versions == version)
      expected = logp[len(prompt) - 1 + places, c.tokens[places]]
      np.testing.assert_allclose(c.logps[places], expected, atol=1e-5)
  assert any(len(versions) > 2 for versions in seen)


def test_one_prefill_serves_all_answers_of_a_prompt(own, monkeypatch):
  calls, slots = [], own._slots
  prefill = slots.prefill
  monkeypatch.setattr(
    slots, 'prefill', lambda w, a: calls.append(len(a)) or prefill(w, a)
  )
  play(own, requests(count=6, size=3))
  assert sum(calls) == 6 and max(calls) == 3  # rows, three a call


def test_a_token_that_is_no_number_aborts_its_answer_alone(own, plain):
  asked, expected = plain
  spoilt = sampler()
  tree = toys.parameters()
  hit = int(expected[0, 0].tokens[0])
  tree['embed'] = jnp.asarray(tree['embed']).at[hit].set(jnp.nan)
  spoilt.load(tree, 0)
  found, _, _ = play(spoilt, asked)
  kinds = {c.finish for c in found.values()}
  assert 'aborted' in kinds and len(found) == len(expected)


# --- with grading ---


def slow(text, prompt):
  """A verifier that takes its time."""
  time.sleep(random.choice([0.0, 0.0, 0.05]))
  return float(len(text) % 2)


def broken(text, prompt):
  raise RuntimeError('never works')


@pytest.fixture(scope='module')
def grader():
  with GradingPool(workers=2, warm=['exact']) as found:
    yield found


def with_verifier(asked, verifier):
  return [
    dataclasses.replace(
      r, prompt=dataclasses.replace(r.prompt, reward=verifier, answer='x')
    )
    for r in asked
  ]


def open_pool(own, grader, stopping=lambda: False):
  marking = Marking(grader, lambda completion, sampling: spell(completion.tokens))
  return OpenPool(
    [own], marking, is_global=False, stopping=stopping, progress=lambda text: None
  )


def plan_of(asked):
  places = np.repeat(np.arange(len(asked)), [r.size for r in asked]).astype(np.int32)
  answers = np.concatenate([np.arange(r.size) for r in asked]).astype(np.int32)
  share = Share(requests=places, answers=answers)
  return Plan(
    step=0,
    version=0,
    requests=asked,
    shares=(share,),
    visits={},
    draws={},
    visited=len(asked),
    pruned=0,
  )


def run(pool, count, *, until=10**9):
  reports, groups = [], []
  pool.begin_fill(0)
  while len(groups) < count and pool.tick < until:
    more = pool.advance(pool.tick + CHUNK)
    reports += more[0]
    groups += more[1]
    while not any(e.clock.queue or e.clock.running for e in pool._engines):
      if len(groups) == count:
        break
      groups += pool.advance(pool.tick)[1]  # waits for grades
  return reports, groups


VERIFIER = f'{__name__}:slow'


def test_groups_come_graded_and_once_however_long_grading_takes(own, grader):
  asked = with_verifier(requests(), 'exact')
  quick, slowly = open_pool(own, grader), open_pool(own, grader)
  quick.feed(plan_of(asked))
  reports, groups = run(quick, 6)
  quick.suspend()
  assert sorted(g.request.draw for g in groups) == list(range(6))
  assert all(g.size == 3 and len(g.verdicts) == 3 for g in groups)
  slowly.feed(plan_of(with_verifier(requests(), VERIFIER)))
  more, late = run(slowly, 6)
  slowly.suspend()
  events = [(r.tick, r.started, r.ended) for r in reports if r.started or r.ended]
  assert events == [(r.tick, r.started, r.ended) for r in more if r.started or r.ended]
  for one, other in zip(
    sorted(groups, key=lambda g: g.request.draw),
    sorted(late, key=lambda g: g.request.draw),
    strict=True,
  ):
    for a, b in zip(one.completions, other.completions, strict=True):
      np.testing.assert_array_equal(a.tokens, b.tokens)


@pytest.mark.parametrize('until', [3, 9, 15])
def test_what_is_in_flight_can_be_taken_up_elsewhere(own, grader, until):
  asked = with_verifier(requests(), 'exact')
  whole = open_pool(own, grader)
  whole.feed(plan_of(asked))
  _, expected = run(whole, 6)
  whole.suspend()
  first = open_pool(own, grader)
  first.feed(plan_of(asked))
  _, groups = run(first, 6, until=until)
  left = through_json(first.suspend()())
  with GradingPool(workers=1, warm=['exact']) as other:  # another process has its own
    second = open_pool(own, other)
    second.resume(left)
    assert second.suspend()().tick == until
    groups += run(second, 6 - len(groups))[1]
    second.suspend()
  grader.collect()  # what the first one left
  same(
    {(c.draw, c.answer): c for g in groups for c in g.completions},
    {(c.draw, c.answer): c for g in expected for c in g.completions},
  )


def through_json(in_flight: InFlight) -> InFlight:
  rows = [
    [c.draw, c.answer, c.tokens.tolist(), c.logps.tolist(), c.finish, c.version]
    for c in in_flight.completions.values()
  ]
  completions = {
    (draw, k): Completion(
      draw=draw,
      answer=k,
      tokens=np.array(tokens, np.int32),
      logps=np.array(logps, np.float32),
      finish=finish,
      version=version,
    )
    for draw, k, tokens, logps, finish, version in json.loads(json.dumps(rows))
  }
  return InFlight(
    tick=in_flight.tick,
    requests=in_flight.requests,
    completions=completions,
    running=in_flight.running,
    queued=in_flight.queued,
  )


def test_a_signal_stops_it_while_a_grade_is_awaited(own, grader):
  asked, stop = with_verifier(requests(count=1), VERIFIER), []
  pool = open_pool(own, grader, stopping=lambda: bool(stop))
  pool.feed(plan_of(asked))
  pool.begin_fill(0)
  stop.append(1)
  with pytest.raises(Stopped):
    pool.advance(CHUNK)
  pool.suspend()


def test_a_verifier_that_never_works_ends_the_run(own, grader):
  asked = with_verifier(requests(count=180, size=3), f'{__name__}:broken')
  pool = open_pool(own, grader)
  pool.feed(plan_of(asked))
  with pytest.raises(ValueError, match='in a row could not be graded'):
    run(pool, 180)
  pool.suspend()
  jax.block_until_ready(own.weights(0))
