"""The form of the layers that one CPU takes is the one that accelerators take."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import CONFIG

from jaxrl_sched.device import lora, model
from jaxrl_sched.device import mesh as meshes

B, T = 3, 24
rng = np.random.default_rng(0)
TOKENS = jnp.asarray(rng.integers(0, 300, (B, T)), jnp.int32)
SEGMENTS = jnp.asarray(np.sort(rng.integers(0, 3, (B, T)))[:, ::-1].copy(), jnp.int32)
POSITIONS = jnp.asarray(rng.integers(0, 9, (B, T)), jnp.int32)
ANSWERS = jnp.asarray(rng.integers(0, 3, (B, T)), jnp.int32)
OUT = jnp.asarray(rng.normal(size=(B, T, CONFIG.d_model)), jnp.float32)


@pytest.mark.parametrize(
  'remat, adapters, answers',
  [(False, False, None), (True, True, None), (True, False, ANSWERS)],
)
def test_flat_and_unrolled_layers_have_the_values_and_gradients_of_scanned_ones(
  remat, adapters, answers
):
  config = CONFIG
  if adapters:
    config = dataclasses.replace(CONFIG, lora=lora.Lora(rank=2, alpha=4.0))
  parameters = model.init(config, 0)

  def value(parameters, mesh):
    hidden = model.decoder(config, parameters).rows(
      TOKENS, SEGMENTS, POSITIONS, answers=answers, remat=remat, mesh=mesh
    )
    return jnp.sum(hidden * OUT), hidden

  (_, scanned), expected = jax.jit(
    jax.value_and_grad(lambda p: value(p, None), has_aux=True)
  )(parameters)
  (_, flat), found = jax.jit(
    jax.value_and_grad(lambda p: value(p, meshes.make_mesh()), has_aux=True)
  )(parameters)
  # To a few roundings of float32, of the size of each array.
  for one, other in zip(
    *(jax.tree.leaves(x) for x in ((flat, found), (scanned, expected))), strict=True
  ):
    size = max(1e-3, float(jnp.abs(other).max()))
    np.testing.assert_allclose(one / size, other / size, rtol=0, atol=3e-6)


def text_of(mesh) -> str:
  parameters = model.init(CONFIG, 0)

  def hidden(parameters):
    return model.decoder(CONFIG, parameters).rows(
      TOKENS[:2], SEGMENTS[:2], POSITIONS[:2], mesh=mesh
    )

  return str(jax.make_jaxpr(hidden)(parameters))


def test_layers_are_scanned_but_on_a_single_cpu():
  assert ' scan[' not in text_of(meshes.make_mesh())
  assert ' scan[' in text_of(meshes.make_mesh(data=2))
  assert ' scan[' in text_of(None)
