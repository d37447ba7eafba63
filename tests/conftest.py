"""Where tests run: eight CPU devices, no network, compiled programs kept on disk."""

import os
import pathlib
import sys

# Through the environment, so that the commands that tests start have them too: a
# program that is kept is found again only where there are as many devices.
_KEPT = pathlib.Path(__file__).parent.parent / '.pytest_cache' / 'jax'
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = '8'
os.environ['HF_HUB_OFFLINE'] = '1'
os.environ['TOKENIZERS_PARALLELISM'] = 'false'
# Threads of torch spin while they wait for one another: where tests share the cores,
# the same numbers took ten times the CPU time with two threads.
os.environ['OMP_NUM_THREADS'] = '1'
if sys.version_info >= (3, 12):
  # gcsfs uses it by aiohttp; in C (6.7 to 7.2) it crashed collections of garbage of
  # Python 3.12.1 in most runs of test_storage.py, and never those of 3.11.
  os.environ['MULTIDICT_NO_EXTENSIONS'] = '1'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_KEPT))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Where several share the cores, how long an example takes says nothing.
hypothesis.settings.register_profile('patient', deadline=None)
hypothesis.settings.load_profile('patient')
# An axis that numpy would have added in silence is an error.
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(scope='session', autouse=True)
def commands_have_no_torch():
  """Not set above, where the processes that run the tests would have none either."""
  path = [str(pathlib.Path(__file__).parent / 'without_torch')]
  path += [os.environ['PYTHONPATH']] if os.environ.get('PYTHONPATH') else []
  os.environ['PYTHONPATH'] = os.pathsep.join(path)
