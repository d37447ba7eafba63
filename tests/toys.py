"""Toys that tests share: a two-layer model, a model that is a table, requests, groups.

The table's logits depend on the current token alone, so that what a policy does can
be said on paper.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sched.device import mixed_state, model
from jaxrl_sched.device.model import ModelConfig
from jaxrl_sched.types import Completion, Group, Prompt, Request, Sampling

# Ids 0 to 299 are known, of 304: three blocks of the sampler's inverse CDF.
CONFIG = ModelConfig(
  vocab_size=304,
  known_tokens=300,
  d_model=16,
  d_ff=32,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
)

TABLE = ModelConfig(
  vocab_size=16,
  known_tokens=16,
  d_model=16,
  d_ff=2,
  layers=1,
  heads=2,
  kv_heads=2,
  head_dim=2,
  tied=False,
)

COMPILATION = '/jax/core/compile/backend_compile_duration'


def parameters(config: ModelConfig = CONFIG, seed: int = 0, *, sharpness: float = 20.0):
  """Fresh parameters whose softmax is far from flat, with rare and likely tokens."""
  fresh = model.init(config, seed)
  fresh['embed'] = fresh['embed'] * sharpness
  return fresh


def lines(workdir, name='metrics.jsonl'):
  """What a run wrote, but for times."""
  found = []
  for line in (pathlib.Path(workdir) / name).read_text().splitlines():
    line = json.loads(line)
    found.append({k: v for k, v in line.items() if not k.startswith('time/')})
  return found


def written(state):
  """As a checkpoint holds it."""
  return mixed_state.dump(state, 'state')


def through_files(state):
  """As a checkpoint gives it back."""
  return mixed_state.load(*written(state))


def table(logits: np.ndarray, config: ModelConfig = TABLE) -> dict:
  """Parameters under which the logits after token i are logits[i].

  Rows and columns that are not given are 0 and far below.
  """
  given = np.full((config.vocab_size, config.d_model), -100.0, np.float32)
  given[: len(logits[0]), : len(logits)] = np.transpose(logits)
  tree = jax.tree.map(lambda w: np.zeros(w.shape, w.dtype), model.abstract(config)[0])
  # Normed, the embedding of i is sqrt(D) at i: large, so that eps has no say.
  tree['embed'] = 1e3 * np.eye(config.vocab_size, config.d_model, dtype=np.float32)
  tree['norm']['scale'] += 1
  tree['head'] = given * config.d_model**-0.5
  return jax.tree.map(jnp.asarray, tree)


def chain(*tokens: int) -> np.ndarray:
  """Logits [16, 16] of a table that goes this way, each token after the one before."""
  logits = np.full((16, 16), -100.0, np.float32)
  for now, after in zip(tokens, tokens[1:], strict=False):
    logits[now, after] = 0.0
  return logits


def prompt(tokens: Sequence[int], index: int = 0, **fields) -> Prompt:
  return Prompt(
    id=f'toy/{index}',
    dataset='toy',
    index=index,
    tokens=np.asarray(tokens, np.int32),
    text=' '.join(map(str, tokens)),
    **fields,
  )


def request(
  draw: int, tokens: Sequence[int], size: int = 1, *, max_new_tokens: int = 8, **how
) -> Request:
  """`how` is of Sampling."""
  return Request(
    draw=draw,
    prompt=prompt(tokens, index=draw),
    size=size,
    sampling=Sampling(max_new_tokens=max_new_tokens, **how),
  )


def group(
  rng: np.random.Generator,
  draw: int,
  lengths: Sequence[int],
  *,
  prompt_length: int = 3,
  version: int = 0,
  known: int = CONFIG.known_tokens,
) -> Group:
  """Random answers of these lengths, with log-probs that a sampler might have had."""
  tokens = rng.integers(known, size=prompt_length)
  completions = tuple(
    Completion(
      draw=draw,
      answer=k,
      tokens=rng.integers(known, size=n).astype(np.int32),
      logps=(-5 * rng.random(n)).astype(np.float32),
      finish='stop',
      version=version,
    )
    for k, n in enumerate(lengths)
  )
  rewards = rng.random(len(lengths)).astype(np.float32)
  return Group(
    request=dataclasses.replace(request(draw, tokens), size=len(lengths)),
    completions=completions,
    verdicts=rewards,
    rewards=rewards,
  )


@contextlib.contextmanager
def compilations():
  """The list of the compilations that happen inside, with their seconds."""
  seen = []

  def listen(event: str, seconds: float, **_) -> None:
    if event == COMPILATION:
      seen.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seen
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def graded(
  request: Request,
  verdicts: Sequence[float],
  *,
  length: int = 3,
  finish: str = 'stop',
  version: int = 0,
) -> Group:
  """Answers with these verdicts, all alike. The log-probs are not whole in binary."""
  verdicts = np.array(verdicts, np.float32)
  completions = tuple(
    Completion(
      draw=request.draw,
      answer=k,
      tokens=np.arange(k, k + length, dtype=np.int32),
      logps=np.full(length, -1 / 3, np.float32),
      finish=finish,
      version=version,
    )
    for k in range(len(verdicts))
  )
  return Group(
    request=request,
    completions=completions,
    verdicts=verdicts,
    rewards=verdicts,
    faults=(None,) * len(verdicts),
  )


def kept(lengths, aborted, size, first_finished):
  """The answers that relief keeps, by definition: what was not aborted comes first, by
  number or by length."""
  good = [a for a in range(len(lengths)) if not aborted[a]]
  if first_finished:
    good.sort(key=lambda a: (lengths[a], a))
  bad = [a for a in range(len(lengths)) if aborted[a]]
  return set((good + bad)[:size])
