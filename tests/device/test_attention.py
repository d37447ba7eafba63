"""Attention on packed rows: TPU's kernel gives what the plain one gives.

The kernel's program is interpreted, since there is no TPU; that it is one which a TPU
takes is shown by lowering it for one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sched.device import attention, splash
from jaxrl_sched.device import mesh as meshes

ROWS = ('rows', 'tokens')
SPREAD = dict(fsdp=2, sequence=2, model=2)


def draw(h, dtype='float32', *, t=256, rows=2, heads=4, kv_heads=2):
  """q, k, v, a weight of each output, segments: several and padding, or padding only."""
  rng = np.random.default_rng(0)
  shapes = [(rows, t, n, h) for n in (heads, kv_heads, kv_heads, heads)]
  segments = np.zeros((rows, t), np.int32)
  segments[0, :100], segments[0, 100:130], segments[0, 130 : t - 20] = 1, 2, 3
  return *(jnp.asarray(rng.normal(size=s), dtype) for s in shapes), segments


def both(attend, q, k, v, weight, segments):
  """What it gives, and the gradients of q, k and v under these weights."""

  def f(q, k, v):
    out = attend(q, k, v, segments).astype(jnp.float32)
    return jnp.sum(out * weight.astype(jnp.float32)), out

  (_, out), gradients = jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(q, k, v)
  return out, *gradients


@pytest.mark.parametrize(
  'h, dtype, t, shape',
  [
    (64, 'float32', 640, {}),  # five blocks of 128
    (128, 'bfloat16', 256, {}),
    (128, 'float32', 200, SPREAD),  # padded to 256, a block of 128 for each half
  ],
)
def test_the_kernel_gives_what_plain_attention_gives(h, dtype, t, shape):
  mesh = meshes.make_mesh(**shape)
  kernel = functools.partial(splash.attend, mesh=mesh, axes=ROWS, interpret=True)
  data = draw(h, dtype, t=t)
  found = both(kernel, *data)
  *exact, segments = data
  expected = both(attention.packed, *(x.astype('float32') for x in exact), segments)
  tolerance = {'float32': 1e-5, 'bfloat16': 2e-2}[dtype]
  for a, b in zip(found, expected, strict=True):
    assert np.any(b[1])  # padding sees padding, also where there is nothing else
    a, b = np.asarray(a, np.float32), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def test_prompts_of_a_sampler_are_spread_over_all_axes_but_that_of_heads():
  *data, weight, segments = draw(64, t=128, rows=4)
  mesh = meshes.make_mesh(**SPREAD)
  at = meshes.sharding(mesh, 'slots', None, 'heads', None)
  f = functools.partial(splash.attend, mesh=mesh, axes=('slots', None), interpret=True)
  found = jax.jit(f)(*data, segments)
  assert found.sharding.is_equivalent_to(at, 4)
  np.testing.assert_allclose(found, attention.packed(*data, segments), atol=1e-5)


def test_a_token_takes_its_own_segment_up_to_itself_alone():
  """With v the one-hot of its place, an output is the weights; q = 0 makes them even."""
  t, ends = 128, [0, 5, 6, 100, 128]
  segments = np.repeat([[1, 2, 3, 0]], np.diff(ends), axis=1).astype(np.int32)
  q, v = jnp.zeros((1, t, 1, t)), jnp.eye(t).reshape(1, t, 1, t)
  expected = np.zeros((t, t))
  for start, end in zip(ends, ends[1:], strict=False):
    for i in range(start, end):
      expected[i, start : i + 1] = 1 / (i + 1 - start)
  mesh = meshes.make_mesh()
  kernel = functools.partial(splash.attend, mesh=mesh, axes=ROWS, interpret=True)
  for attend in (jax.jit(kernel), attention.packed):
    found = attend(q, q, v, segments)[0, :, 0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize('h', [64, 128])
def test_a_tpu_is_given_three_kernels_and_no_scores(h):
  """Forward, and backward for q and for k and v; heads of 64 are taken as they are."""
  q, k, v, _, segments = draw(h, 'bfloat16', t=1024)
  mesh = meshes.make_mesh(**SPREAD)

  def f(q, k, v):
    out = splash.attend(q, k, v, segments, mesh=mesh, axes=ROWS)
    return out.astype(jnp.float32).sum()

  lowered = jax.jit(jax.grad(f, (0, 1, 2))).trace(q, k, v)
  text = lowered.lower(lowering_platforms=('tpu',)).as_text()
  assert text.count('stablehlo.custom_call @tpu_custom_call') == 3
  assert '1024x1024' not in text and '512x1024' not in text  # T x T, a device's part


@dataclasses.dataclass(frozen=True)
class Chip:
  """As much of a device as a mesh of them needs."""

  id: int
  platform: str
  process_index: int = 0
  device_kind: str = 'chip'


@pytest.mark.parametrize(
  'platform, t, answers, expected',
  [
    ('tpu', 256, False, True),
    ('tpu', 200, False, True),
    ('tpu', 64, False, False),  # shorter than a block
    ('tpu', 256, True, False),  # answers that share a prompt
    ('gpu', 256, False, False),
    ('cpu', 256, False, False),
  ],
)
def test_the_kernel_is_for_long_rows_on_tpus(platform, t, answers, expected):
  chips = [Chip(i, platform) for i in range(4)]
  mesh = meshes.make_mesh(fsdp=2, model=2, devices=chips)
  q, k, v, _, segments = draw(64, t=t)
  how = dict(answers=segments if answers else None, mesh=mesh)
  jaxpr = jax.make_jaxpr(functools.partial(attention.packed, **how))(q, k, v, segments)
  assert ('pallas_call' in str(jaxpr)) == expected
