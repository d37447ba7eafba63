"""What is done about long answers: kept by their lengths alone, gone on with exactly.

The sampler is put to test against what it samples without any relief.
"""

import dataclasses

import jax
import numpy as np
import pytest
import toys

from jaxrl_sched.device import model
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.types import Completion, Relief, Share

SEED = 3
EOS = 2


def spell(tokens) -> str:
  return ''.join(chr(97 + t % 26) for t in tokens)


# --- spare answers, sampled ---------------------------------------------------------


def lengthy(seed=0):
  """A table under which answers have about 6 tokens, a few many more."""
  logits = np.random.default_rng(seed).normal(size=(16, 16))
  logits[:, EOS] += 1.0
  return toys.table(logits)


@pytest.fixture(scope='module')
def samplers():
  """Nothing about one is like the other."""
  how = dict(cache_length=48, seed=SEED, detokenize=spell)
  return [
    Sampler(lengthy(), toys.TABLE, slots=5, chunk=3, **how),
    Sampler(lengthy(), toys.TABLE, slots=16, chunk=7, prefill_rows=2, **how),
  ]


def requests(size, count=12, *, limit=40, **how):
  return [
    toys.request(
      draw,
      np.arange(1 + draw % 5) + 3,
      size,
      max_new_tokens=limit,
      stop_ids=(EOS,),
      **how,
    )
    for draw in range(count)
  ]


def with_relief(asked, size, **how):
  return [dataclasses.replace(r, size=size, relief=Relief(**how)) for r in asked]


def shuffled(asked, seed):
  keys = [(i, k) for i, r in enumerate(asked) for k in r.missing]
  keys = np.random.default_rng(seed).permutation(keys)
  return Share(requests=keys[:, 0], answers=keys[:, 1])


def run(rollout):
  while rollout.advance():
    pass
  return rollout


def same(a, b):
  assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish
  np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)


@pytest.mark.parametrize('first_finished', [False, True])
@pytest.mark.parametrize('seed', [None, 0, 1])
def test_the_same_are_kept_in_any_slots_chunks_and_order(
  samplers, first_finished, seed
):
  """Those of whom the definition speaks, with the tokens they have anyway."""
  everything = requests(7)
  full = {(c.draw, c.answer): c for c in samplers[0].generate(everything)}
  asked = with_relief(everything, 4, spare=3, first_finished=first_finished)
  kept = {
    (draw, k)
    for draw in range(len(asked))
    for k in toys.kept(
      [len(full[draw, k].tokens) for k in range(7)], [0] * 7, 4, first_finished
    )
  }
  for sampler in samplers:
    told = []
    share = None if seed is None else shuffled(asked, seed)
    rollout = run(
      sampler.begin(
        asked, share=share, on_finish=lambda r, c, told=told: told.append(c)
      )
    )
    assert set(rollout.completions) == kept
    assert sorted((c.draw, c.answer) for c in told) == sorted(kept)
    assert set(rollout.cut) == set(full) - kept
    for key, completion in rollout.completions.items():
      same(completion, full[key])
    saved = [len(full[key].tokens) - count for key, count in rollout.cut.items()]
    assert min(saved) >= 0 and sum(saved) > 0  # and slots were free earlier
    assert not sampler._slots._state['alive'].any()  # also on the device


def test_spare_answers_come_in_answer_order_and_do_not_stay_in_slots(samplers):
  sampler = samplers[0]
  asked = with_relief(requests(7), 4, spare=3, first_finished=True)
  found = sampler.generate(asked)
  assert len(found) == 4 * len(asked)
  keys = [(c.draw, c.answer) for c in found]
  assert keys == sorted(keys)
  plain = sampler.generate(requests(3))  # in the slots that were cut
  alone = samplers[1].generate(requests(3))
  for a, b in zip(plain, alone, strict=True):
    same(a, b)


def test_spare_answers_are_refused_where_a_request_is_split(samplers):
  asked = with_relief(requests(3, 2), 2, spare=1)
  whole = Share(requests=np.zeros(3, int), answers=np.arange(3))
  for share in (
    dataclasses.replace(whole, cuts=np.array([0])),
    Share(requests=np.zeros(2, int), answers=np.arange(2)),
  ):
    with pytest.raises(ValueError, match="'toy/0': spare=1 with static minibatches"):
      samplers[0].begin(asked, share=share)
  assert len(run(samplers[0].begin(asked, share=whole)).completions) == 2


# --- partial rollouts ---------------------------------------------------------------


def bundles(sampler, asked, *, share=lambda asked: None, load=lambda bundle: None):
  """Goes on until nothing is paused: the last completions, bundles, what was cut."""
  done, cut, count = {}, {}, 0
  while asked:
    load(count)
    rollout = run(sampler.begin(asked, share=share(asked)))
    count += 1
    cut |= rollout.cut
    again = []
    for request in asked:
      mine = tuple(
        c for (draw, _), c in rollout.completions.items() if draw == request.draw
      )
      if any(c.finish == 'paused' for c in mine):
        again.append(dataclasses.replace(request, begun=mine))
      else:
        done |= {(c.draw, c.answer): c for c in mine}
    asked = again
  return done, count, cut


@pytest.mark.parametrize('pause_after', [1, 2, 3, 7, 39, 40, 100])
def test_a_paused_answer_goes_on_as_if_it_had_not_been(samplers, pause_after):
  """With the same weights: the same tokens, whatever the chunk and the slots."""
  everything = requests(3, stop_strings=('nan', 'ee'))
  full = samplers[0].generate(everything)
  for sampler in samplers:
    asked = with_relief(everything, 3, pause_after=pause_after)
    found, count, cut = bundles(sampler, asked, share=lambda a: shuffled(a, 0))
    assert set(found) == {(c.draw, c.answer) for c in full} and not cut
    for c in full:
      same(found[c.draw, c.answer], c)
      assert found[c.draw, c.answer].earlier == ()
      assert set(found[c.draw, c.answer].versions) == {0}
    assert count == -(-max(len(c.tokens) for c in full) // pause_after)
  ends = [c.finish for c in full]
  assert ends.count('stop') > 3 and max(len(c.tokens) for c in full) > 15


def test_a_deep_model_goes_on_as_if_it_had_not_been():
  """Keys and values of a prefill in the place of those that decoding left."""
  prompts = np.random.default_rng(0).integers(300, size=(5, 9))
  how = [dict(), dict(temperature=0.7, top_k=12), dict(temperature=0.0)]
  asked = [
    toys.request(i, p, 4, max_new_tokens=30, stop_ids=(7, 19), **how[i % 3])
    for i, p in enumerate(prompts)
  ]
  sampler = Sampler(
    toys.parameters(), toys.CONFIG, slots=6, cache_length=64, chunk=4, seed=SEED
  )
  sampler.warm_up(9, longest_part=29)
  full = sampler.generate(asked)
  with toys.compilations() as seen:
    for pause_after in (4, 11):
      found, count, _ = bundles(sampler, with_relief(asked, 4, pause_after=pause_after))
      assert count > 2
      for c in full:
        same(found[c.draw, c.answer], c)
  assert not seen


def test_every_token_keeps_the_version_it_was_sampled_with():
  """Weights change with each bundle; 3 tokens of each, then log-probs under its own."""
  tables = [np.random.default_rng(v).normal(size=(16, 16)) for v in range(3)]
  sampler = Sampler(
    toys.table(tables[0]), toys.TABLE, slots=4, cache_length=20, chunk=2, seed=SEED
  )
  asked = [toys.request(0, [1], 6, max_new_tokens=10)]

  def load(bundle):
    version = (0, 0, 1, 2)[bundle]
    sampler.load(toys.table(tables[version]), version=version)

  found, count, _ = bundles(sampler, with_relief(asked, 6, pause_after=3), load=load)
  assert count == 4
  for c in found.values():
    assert (c.version, c.earlier) == (2, ((6, 0), (3, 1)))
    assert c.versions.tolist() == [0] * 6 + [1] * 3 + [2]
    before = np.concatenate([[1], c.tokens[:-1]])
    logits = np.stack(tables)[c.versions, before]
    own = logits[np.arange(10), c.tokens] - np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(c.logps, own, atol=1e-4)


@pytest.mark.parametrize('first_finished', [False, True])
def test_who_is_kept_is_the_same_with_pauses(samplers, first_finished):
  everything = requests(6)
  full = {(c.draw, c.answer): c for c in samplers[0].generate(everything)}
  how = dict(spare=2, first_finished=first_finished, pause_after=4)
  paths = []
  for sampler in samplers:
    found, count, cut = bundles(sampler, with_relief(everything, 4, **how))
    assert count > 1
    kept = {
      (draw, k)
      for draw in range(len(everything))
      for k in toys.kept(
        [len(full[draw, k].tokens) for k in range(6)], [0] * 6, 4, first_finished
      )
    }
    assert set(found) == kept and set(cut) == set(full) - kept
    for key, completion in found.items():
      same(completion, full[key])
    paths.append(count)
  assert paths[0] == paths[1]


def test_what_ended_is_passed_on_by_one_engine_alone(samplers):
  """Static minibatches may spread the paused answers of a request over engines."""
  everything = requests(5)
  full = {(c.draw, c.answer): c for c in samplers[0].generate(everything)}
  first = run(samplers[0].begin(with_relief(everything, 5, pause_after=4))).completions
  again = []
  for request in everything:
    mine = tuple(first[request.draw, k] for k in range(5))
    if 1 < sum(c.finish == 'paused' for c in mine) < 5:
      again.append(dataclasses.replace(request, begun=mine))
  again = again[:3]  # they fit the slots
  missing = [request.missing for request in again]
  assert len(missing) == 3
  parts = []
  for engine, sampler in enumerate(samplers):
    keys = np.array([(i, k) for i, m in enumerate(missing) for k in m[engine::2]])
    share = Share(requests=keys[:, 0], answers=keys[:, 1], cuts=np.array([0]))
    parts.append(run(sampler.begin(again, share=share)).completions)
  assert not set(parts[0]) & set(parts[1])
  found = parts[0] | parts[1]
  assert set(found) == {(r.draw, k) for r in again for k in range(5)}
  for key, completion in found.items():
    same(completion, full[key])


def begun(answer=0, *, draw=0, count=3, finish='paused'):
  return Completion(
    draw=draw,
    answer=answer,
    tokens=np.full(count, 4, np.int32),
    logps=np.zeros(count, np.float32),
    finish=finish,
    version=0,
  )


@pytest.mark.parametrize(
  'change, complaint',
  [
    (dict(relief=Relief(spare=-1)), 'spare=-1'),
    (dict(relief=Relief(pause_after=-1)), 'pause_after=-1'),
    (dict(begun=(begun(), begun(2))), 'answer 2 of draw 0, expected answers 0 to 1'),
    (dict(begun=(begun(), begun(0))), 'answer 0 of draw 0'),
    (dict(begun=(begun(), begun(1, draw=1))), 'answer 1 of draw 1'),
    (dict(begun=(begun(), begun(1, count=0))), 'answer 1 paused after 0 tokens'),
    (dict(begun=(begun(), begun(1, count=8))), 'answer 1 paused after 8 tokens'),
    (dict(begun=(begun(),)), 'begun with 1 answers'),
    (dict(begun=(begun(finish='stop'), begun(1, finish='stop'))), '0 of them paused'),
  ],
)
def test_what_cannot_be_gone_on_with_is_refused_by_name(samplers, change, complaint):
  request = dataclasses.replace(toys.request(0, [1], 2), **change)
  with pytest.raises(ValueError, match=f"prompt 'toy/0': .*{complaint}"):
    samplers[0].begin([request])


# --- logits that are not numbers (D2) -----------------------------------------------


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_an_answer_without_a_finite_log_prob_is_aborted_there(temperature):
  """4, 5, then logits of nan: [5] is left; 8 goes nowhere at once; 9 is not touched.

  One slot, so that each sits where another one was spoilt, past what its own prompt
  overwrites of it.
  """
  logits = toys.chain(4, 5, 6) + 100 + toys.chain(9, 10, 11, 12, 13, 14)
  parameters = toys.table(logits)
  for token in (5, 8):
    parameters['embed'] = parameters['embed'].at[token].set(np.nan)
  sampler = Sampler(
    parameters, toys.TABLE, slots=1, cache_length=40, chunk=4, prefill_rows=1
  )
  sampler.warm_up(30)
  asked = [
    toys.request(i, prompt, max_new_tokens=5, temperature=temperature)
    for i, prompt in enumerate([[4] * 30, [9], [8] * 30, [9], [4] * 30, [9]])
  ]
  told = []
  with toys.compilations() as seen:
    found = sampler.generate(asked, on_finish=lambda r, c: told.append(c))
  assert not seen
  good = ([10, 11, 12, 13, 14], 'length')
  bad = ([5], 'aborted')
  ends = [(c.tokens.tolist(), c.finish) for c in found]
  assert ends == [bad, good, ([], 'aborted'), good, bad, good]
  assert all(len(c.logps) == len(c.tokens) for c in found)
  assert all(np.isfinite(c.logps).all() for c in found)
  assert len(told) == 6


def test_aborted_answers_are_replaced_by_spare_ones_while_there_are_any():
  """Half of the answers draw a token whose embedding is no number."""
  logits = np.full((16, 16), -100.0)
  logits[:, [5, 6]] = 0.0
  parameters = toys.table(logits)
  parameters['embed'] = parameters['embed'].at[5].set(np.nan)
  sampler = Sampler(parameters, toys.TABLE, slots=3, cache_length=20, chunk=2)
  asked = [toys.request(i, [1], 8, max_new_tokens=2) for i in range(20)]
  full = {(c.draw, c.answer): c for c in sampler.generate(asked)}
  good = [[k for k in range(8) if full[r.draw, k].finish == 'length'] for r in asked]
  bad = [[k for k in range(8) if full[r.draw, k].finish == 'aborted'] for r in asked]
  assert {len(g) >= 3 for g in good} == {True, False}  # both were put to test
  found = sampler.generate(with_relief(asked, 3, spare=5))
  keys = [(c.draw, c.answer) for c in found]
  assert keys == [(i, k) for i in range(20) for k in sorted((good[i] + bad[i])[:3])]


def test_an_answer_that_is_aborted_as_it_goes_on_keeps_what_it_had():
  logits = toys.chain(4, 5, 6, 7, 8)
  sampler = Sampler(toys.table(logits), toys.TABLE, slots=2, cache_length=20, chunk=2)
  asked = with_relief([toys.request(0, [4], max_new_tokens=4)], 1, pause_after=2)
  (part,) = run(sampler.begin(asked)).completions.values()
  assert (part.tokens.tolist(), part.finish) == ([5, 6], 'paused')
  fresh = model.init(toys.TABLE, 0)
  broken = jax.tree.map(lambda w: np.full(w.shape, np.nan, w.dtype), fresh)
  sampler.load(broken, version=1)
  again = [dataclasses.replace(asked[0], begun=(part,))]
  (whole,) = run(sampler.begin(again)).completions.values()
  assert (whole.tokens.tolist(), whole.finish) == ([5, 6], 'aborted')
  assert (whole.version, whole.earlier) == (0, ())
