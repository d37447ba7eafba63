"""Log-probs by slices of the vocabulary are plain log-softmax, in little memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model
from jaxrl_sched.device.learner import answer_logps
from jaxrl_sched.device.logps import LOGITS_AT_ONCE, token_logps

SPREAD = dict(fsdp=2, sequence=2, model=2)


def plain(hidden, head, targets, weight, temperature):
  logits = (hidden @ head.T)[..., : toys.CONFIG.known_tokens] / temperature
  logp = jax.nn.log_softmax(logits, axis=-1)
  chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
  return jnp.sum(weight * chosen), (chosen, -jnp.sum(jnp.exp(logp) * logp, -1))


def sliced(hidden, head, targets, weight, temperature, parts=1, at_once=10**6):
  found = token_logps(
    hidden,
    head,
    toys.CONFIG,
    targets,
    temperature=temperature,
    parts=parts,
    at_once=at_once,
  )
  return jnp.sum(weight * found[0]), found


def draw(rows=2, places=24):
  rng = np.random.default_rng(0)
  v, d = toys.CONFIG.vocab_size, toys.CONFIG.d_model
  targets = rng.integers(toys.CONFIG.known_tokens, size=(rows, places))
  targets[0, :3] = 0, 127, 299  # the first, the last of a slice, the last known
  return (
    rng.normal(size=(rows, places, d)).astype(np.float32),
    rng.normal(size=(v, d)).astype(np.float32),
    targets,
    rng.normal(size=(rows, places)).astype(np.float32),
  )


def both(f):
  return jax.value_and_grad(f, (0, 1), has_aux=True)


def assert_same(found, expected):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-4, rtol=3e-5)


# 304 ids in one slice; in 3, the last beginning earlier; in 2 parts of 2 slices; in 4
# parts of one.
@pytest.mark.parametrize('parts, slices', [(1, 1), (1, 3), (2, 2), (4, 1)])
def test_slices_give_the_values_entropies_and_gradients_of_log_softmax(parts, slices):
  data, width = draw(), -(-toys.CONFIG.vocab_size // parts // slices)
  f = jax.jit(both(sliced), static_argnums=(4, 5, 6))
  for temperature in (1.0, 0.5):
    found = f(*data, temperature, parts, data[2].size * parts * width)
    assert_same(found, both(plain)(*data, temperature))


def test_a_head_cut_over_devices_gives_the_same():
  """Rows on fsdp, their tokens on sequence, the vocabulary on model, D on the others."""
  data = draw(rows=4)
  mesh = meshes.make_mesh(**SPREAD)
  axes = ('rows', 'tokens', None), ('vocab', 'embed'), *[('rows', 'tokens')] * 2
  at = [meshes.sharding(mesh, *names) for names in axes]
  f = jax.jit(both(sliced), static_argnums=(4, 5, 6))
  placed = [jax.device_put(x, to) for x, to in zip(data, at, strict=True)]
  found = f(*placed, 0.7, 2, data[2].size * 2 * 128)
  assert_same(found, both(plain)(*data, 0.7))


@pytest.mark.parametrize('shape, backward', [({}, False), ({}, True), (SPREAD, True)])
def test_the_head_needs_an_eighth_of_the_logits_at_most(shape, backward):
  """Qwen2.5-0.5B's head: fp32 logits of 4,096 tokens would take 2.5 GB.

  Where rows, their tokens and the vocabulary are cut, a device has as many.
  """
  mesh = meshes.make_mesh(**shape)
  v, rows, places, d = 151_936, 4 * mesh.size, 1024, 896
  config = dataclasses.replace(toys.CONFIG, vocab_size=v, known_tokens=v - 271)
  how = dict(parts=meshes.size(mesh, 'vocab'), at_once=LOGITS_AT_ONCE * mesh.size)

  def f(hidden, head, targets):
    return jnp.sum(token_logps(hidden, head, config, targets, **how)[0])

  axes = ('rows', 'tokens', None), ('vocab', 'embed'), ('rows', 'tokens')
  hidden, head, targets = (meshes.sharding(mesh, *names) for names in axes)
  shapes = (
    jax.ShapeDtypeStruct((rows, places, d), 'float32', sharding=hidden),
    jax.ShapeDtypeStruct((v, d), 'float32', sharding=head),
    jax.ShapeDtypeStruct((rows, places), 'int32', sharding=targets),
  )
  f = jax.grad(f, (0, 1)) if backward else f
  out = (hidden, head) if backward else meshes.sharding(mesh)
  compiled = jax.jit(f, out_shardings=out).lower(*shapes).compile()
  taken = compiled.memory_analysis().temp_size_in_bytes
  assert taken < 4 * rows * places * v / mesh.size / 8


@pytest.mark.parametrize('shape', [dict(fsdp=8), SPREAD])
def test_no_device_has_more_than_its_rows(shape, monkeypatch):
  """Eight devices need about an eighth of the memory of one for activations.

  If not constrained, they would all compute every row of an fsdp axis.
  """
  monkeypatch.setattr(meshes, 'is_one_cpu', lambda mesh: False)
  config = dataclasses.replace(toys.CONFIG, d_model=256, d_ff=512, head_dim=64)
  row = ((16, 128), 'int32')

  def taken(mesh):
    shapes, axes = model.abstract(config)
    at = meshes.parameter_shardings(shapes, axes, mesh)
    parameters = jax.tree.map(
      lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, at
    )
    at_rows = meshes.sharding(mesh, 'rows', 'tokens')
    rows = jax.ShapeDtypeStruct(*row, sharding=at_rows)
    batch = dict(tokens=rows, segments=rows, positions=rows)

    def f(parameters, batch):
      return jnp.sum(answer_logps(parameters, config, batch, mesh=mesh)[0])

    compiled = jax.jit(jax.grad(f), out_shardings=at).lower(parameters, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert taken(meshes.make_mesh(**shape)) < taken(meshes.make_mesh()) / 5


def test_entropy_is_that_of_the_known_tokens():
  """log 300 of 304 rows for flat logits; 1.142121 for 0.5, 0.3, 0.15, 0.05."""
  zero, head = jnp.zeros((1, 4, 16)), jnp.zeros((304, 16))
  targets = jnp.zeros((1, 4), jnp.int32)
  _, entropy = token_logps(zero, head, toys.CONFIG, targets)
  np.testing.assert_allclose(entropy, np.log(300), rtol=1e-6)

  # Logits far from 0, two parts, of which the second has no known token.
  far = dataclasses.replace(toys.CONFIG, known_tokens=100)
  flat = jnp.ones((304, 16)) * 1000 / 16
  _, entropy = token_logps(zero + 1, flat, far, targets, parts=2, at_once=4 * 2 * 128)
  np.testing.assert_allclose(entropy, np.log(100), rtol=1e-6)

  four = dataclasses.replace(toys.CONFIG, known_tokens=4)
  head = head.at[:4, 0].set(np.log([0.5, 0.3, 0.15, 0.05]))
  _, entropy = token_logps(zero.at[..., 0].set(1.0), head, four, targets)
  np.testing.assert_allclose(entropy, 1.142121, rtol=1e-5)


@pytest.mark.parametrize('remat', [False, True])
def test_more_layers_are_no_more_to_compile(remat):
  """The program of 24 layers' gradient has as many lines as that of 2."""
  mesh = meshes.make_mesh(data=2)  # on one CPU layers are unrolled

  def lines(layers):
    config = dataclasses.replace(toys.CONFIG, layers=layers)
    shapes, _ = model.abstract(config)
    row = jax.ShapeDtypeStruct((2, 32), 'int32')
    batch = dict(tokens=row, segments=row, positions=row)

    def f(parameters, batch):
      logps = answer_logps(parameters, config, batch, mesh=mesh, remat=remat)[0]
      return jnp.sum(logps)

    return jax.jit(jax.grad(f)).lower(shapes, batch).as_text().count('\n')

  assert lines(24) == lines(2)
