"""The launch scripts for pods: what they ask of gcloud and xpk, and what they do.

Real scripts, against stand-ins from tests/launch_fakes: a gcloud that records its
arguments and has two workers, folders on this machine, on which it runs what it is
asked to; and a Python that ends with the exit codes it is told.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib

from packaging.requirements import Requirement
import pytest

ROOT = pathlib.Path(__file__).parents[1]
FAKES = ROOT / 'tests' / 'launch_fakes'
PLACE = ('--zone=us-test1-a', '--project=my-project', '--quiet')
RUN = ['--config=configs/smoke.py', '--workdir=gs://bucket/run']
# What a shell, a YAML file or a cluster might take for something of its own.
NASTY = [
  "--config.a='two  spaces'",
  '--config.b="$HOME `id` $(id) $$ $(VAR) ${PATH}"',
  '--config.c=a\\b;c&d|e>f<g*h?[i]{j,k}#l!m~',
  '--config.d=',
  '--config.e=naïve',
  '',
]


class Machine:
  """Where scripts run: a copy of the repository, and stand-ins before PATH."""

  def __init__(self, folder: pathlib.Path, repository: pathlib.Path):
    self.play = folder / 'play'
    self.homes = [folder / 'home' / str(i) for i in range(2)]
    for path in (self.play, *self.homes):
      path.mkdir(parents=True)
    self.folder, self.repository = folder, repository
    self.env = {
      'PATH': f'{FAKES}:{os.environ["PATH"]}',
      'HOME': str(self.homes[0]),
      'CLOUD': str(folder),
      'PLAY': str(self.play),
      'REAL_PYTHON': sys.executable,
      'JAXRL_PYTHON': str(FAKES / 'python'),
      'TPU_ZONE': 'us-test1-a',
      'TPU_PROJECT': 'my-project',
      'TPU_POLL_SECONDS': '0.1',
    }
    self.states('ACTIVE')
    self.codes('0')

  def states(self, *states: str) -> None:
    (self.folder / 'states').write_text('\n'.join(states) + '\n')

  def codes(self, *codes: str, process: str = '') -> None:
    (self.play / f'codes{process}').write_text('\n'.join(codes) + '\n')

  def start(self, script: str, *arguments: str, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
      ['bash', self.repository / 'launch' / script, *map(str, arguments)],
      env={k: v for k, v in (self.env | env).items() if v},
      cwd=self.folder,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )

  def run(self, script: str, *arguments: str, code: int = 0, **env: str) -> str:
    process = self.start(script, *arguments, **env)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == code, output
    return output

  def calls(self) -> list[list[str]]:
    """The calls of gcloud, xpk and kubectl that ask for something to be done."""
    asked = _records(self.folder / 'calls')
    return [
      call for call in asked if 'get-value' not in call and 'describe' not in call
    ]

  def started(self, process: int = 0) -> list[list[str]]:
    return _records(self.play / str(process) / 'calls')

  def variables(self, process: int = 0) -> dict[str, str]:
    words = (self.play / str(process) / 'env').read_text().split('\0')
    return dict(word.split('=', 1) for word in words if word)

  def wait_for(self, count: int, process: int = 0) -> None:
    end = time.monotonic() + 15
    while len(self.started(process)) < count:
      assert time.monotonic() < end, f'process {process} has not started'
      time.sleep(0.02)


def _records(file: pathlib.Path) -> list[list[str]]:
  text = file.read_text() if file.exists() else ''
  return [record.split('\0')[:-1] for record in text.split('\x01\0')[:-1]]


@pytest.fixture(scope='module')
def repository(tmp_path_factory):
  """Committed, as what is sent to workers is the last commit."""
  place = tmp_path_factory.mktemp('repository')
  shutil.copytree(ROOT / 'launch', place / 'launch')
  (place / 'configs').mkdir()
  for file in ('pyproject.toml', 'configs/smoke.py'):
    shutil.copy(ROOT / file, place / file)
  who = ['-c', 'user.name=t', '-c', 'user.email=t@example.org', '-c', 'gc.auto=0']
  for words in (['init', '-q'], ['add', '.'], ['commit', '-q', '-m', 'all']):
    subprocess.run(['git', *who, *words], cwd=place, check=True)
  (place / 'new.py').touch()
  return place


@pytest.fixture
def machine(tmp_path, repository):
  machine = Machine(tmp_path, repository)
  yield machine
  for home in machine.homes:  # what a failed test may have left running
    pid = home / 'jaxrl_sched_state' / 'pid'
    if pid.exists() and (home / 'jaxrl_sched_state' / 'exit').exists() is False:
      try:
        os.killpg(int(pid.read_text()), signal.SIGKILL)
      except ProcessLookupError:
        pass


# ---- tpu_vm.sh: create, and what is refused


@pytest.mark.parametrize(
  'options, expected',
  [
    (
      ['--accelerator-type=v5litepod-16'],
      ['--accelerator-type=v5litepod-16', '--runtime-version=v2-alpha-tpuv5-lite'],
    ),
    (
      ['--accelerator-type', 'v5p-128', '--spot'],
      ['--accelerator-type=v5p-128', '--runtime-version=v2-alpha-tpuv5', '--spot'],
    ),
    (
      ['--type=v6e', '--topology=4x4', '--service-account=a@b.c', '--internal-ip'],
      ['--type=v6e', '--topology=4x4', '--runtime-version=v2-alpha-tpuv6e']
      + ['--service-account=a@b.c', '--internal-ips'],
    ),
    (
      ['--accelerator-type=v4-8', '--create-flag=--labels=team=rl x']
      + ['--create-flag=--reserved'],
      ['--accelerator-type=v4-8', '--runtime-version=tpu-ubuntu2204-base']
      + ['--labels=team=rl x', '--reserved'],
    ),
    (
      ['--accelerator-type=v5p-8', '--runtime-version=mine'],
      ['--accelerator-type=v5p-8', '--runtime-version=mine'],
    ),
  ],
)
def test_create_asks_for_a_queued_resource(machine, options, expected):
  output = machine.run('tpu_vm.sh', 'create', 'my-tpu', *options)
  create = ['gcloud', 'compute', 'tpus', 'queued-resources', 'create', 'my-tpu']
  assert machine.calls() == [[*create, '--node-id=my-tpu', *expected, *PLACE]]
  assert 'billed' in output and 'stop my-tpu --delete' in output


def test_create_waits_until_the_slice_is_there(machine):
  machine.states('WAITING_FOR_RESOURCES', 'WAITING_FOR_RESOURCES', 'ACTIVE')
  v5e = '--accelerator-type=v5litepod-8'
  output = machine.run('tpu_vm.sh', 'create', 'a', v5e, '--wait')
  assert re.findall('a: ([A-Z_]+)', output) == ['WAITING_FOR_RESOURCES', 'ACTIVE']
  machine.states('FAILED')
  assert 'FAILED' in machine.run('tpu_vm.sh', 'create', 'a', v5e, '--wait', code=1)


def test_zone_and_project_are_told_by_flags_then_variables_then_gcloud(machine):
  def place(*options, **env):
    machine.run('tpu_vm.sh', 'stop', 'a', '--delete', *options, **env)
    return machine.calls()[-1][-5:-3]

  machine.states('SUSPENDED')
  unset = dict(TPU_ZONE='', TPU_PROJECT='')
  known = unset | dict(GCLOUD_ZONE='of-gcloud', GCLOUD_PROJECT='its')
  flags = ['--zone=of-flag', '--project=mine']
  delete = ['gcloud', 'compute', 'tpus', 'queued-resources', 'delete', 'a']
  machine.run('tpu_vm.sh', 'stop', 'a', '--delete', *flags, **known)
  machine.run('tpu_vm.sh', 'stop', 'a', '--delete', **known)
  machine.run('tpu_vm.sh', 'stop', 'a', '--delete')
  places = [flags, ['--zone=of-gcloud', '--project=its'], [*PLACE[:2]]]
  assert machine.calls() == [
    [*delete, '--force', '--async', *place, '--quiet'] for place in places
  ]
  assert 'no zone: give --zone' in machine.run(
    'tpu_vm.sh', 'status', 'a', code=2, **unset
  )
  unset['TPU_ZONE'] = 'z'
  assert 'no project' in machine.run('tpu_vm.sh', 'status', 'a', code=2, **unset)


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['start', 'a'], "'start': expected create, setup"),
    (['create'], "NAME ''"),
    (['create', 'My_TPU', '--spot'], "NAME 'My_TPU'"),
    (['create', '--spot'], "NAME '--spot'"),
    (['create', 'a;id', '--spot'], "NAME 'a;id'"),
    (['create', 'a' * 64], "NAME 'aaa"),
    (['create', 'a'], 'no --accelerator-type='),
    (['create', 'a', '--type=v6e'], 'no --accelerator-type='),
    (['create', 'a', '--accelerator-type=b', '--type=c'], 'excludes'),
    (['create', 'a', '--accelerator-type'], '--accelerator-type: expected a value'),
    (['create', 'a', '--accelerator-type='], '--accelerator-type: expected a value'),
    (['create', 'a', '--accelerator-type=b', '--spot=yes'], '--spot takes no value'),
    (['create', 'a', '--delete'], '--delete: unknown to create'),
    (['create', 'a', '--accelerator-type=b', '--', 'c'], 'takes nothing after it'),
    (['setup', 'a', '--env-file=none'], 'there is no such file'),
    (['setup', 'a', '--env-file=bad.env'], 'line 2, expected NAME=value'),
    (['setup', 'a', '--extras=math]; id'], '--extras=math]; id'),
    (['logs', 'a', '--worker=x'], '--worker=x'),
    (['logs', 'a', '--lines=x'], '--lines=x'),
    (['stop', 'a', '--timeout=x'], '--timeout=x'),
    (['run', 'a', '--', RUN[0]], 'no --workdir='),
    (['run', 'a', '--', RUN[1]], 'no --config='),
    (
      ['run', 'a', '--', RUN[0], '--workdir=runs/x'],
      '--workdir=runs/x: expected gs://',
    ),
    (['run', 'a', '--', RUN[0], '--workdir', 'runs/x'], '--workdir=runs/x'),
    (['run', 'a', '--', '--config=no.py', RUN[1]], '--config=no.py: no such file'),
    (['run', 'a', '--', '--config=new.py:x', RUN[1]], 'new.py: not in the last commit'),
    (['run', 'a', '--module=export', '--', *RUN], '--module=export'),
    (['run', 'a', '--spot', '--', *RUN], 'only with --keep'),
    (['run', 'a', '--keep', '--', *RUN], 'no --accelerator-type='),
    (['run', 'a', *RUN], '--config=configs/smoke.py: unknown to run'),
  ],
)
def test_what_is_wrong_is_refused_in_a_line_before_anything_is_asked(
  machine, arguments, message
):
  (machine.folder / 'bad.env').write_text('A=1\nhf_secret\n')
  output = machine.run('tpu_vm.sh', *arguments, code=2)
  assert output.startswith('error: ') and output.count('\n') == 1
  assert message in output and 'hf_secret' not in output
  assert machine.calls() == []


# ---- tpu_vm.sh: a run on two workers


def _ssh(command: str, worker: str = 'all') -> list[str]:
  return [
    *('gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'my-tpu', f'--worker={worker}'),
    *(f'--command=cd jaxrl_sched && bash launch/worker.sh {command}', *PLACE),
  ]


def test_a_run_from_setup_to_the_end(machine):
  """Arguments and variables arrive as given, on every worker; stop saves and deletes."""
  machine.codes('wait')
  secrets = machine.folder / 'secrets.env'
  secrets.write_text("# for the hub\nHF_TOKEN=hf_x 'y' $(id)\n\nWANDB_API_KEY=w\n")
  output = machine.run('tpu_vm.sh', 'setup', 'my-tpu', '--env-file=secrets.env')
  commit = _git(machine.repository, 'rev-parse', 'HEAD')[:12]
  assert f'worker 1: set up, commit {commit}, environment ' in output
  for home in machine.homes:
    held = home / 'jaxrl_sched_state' / 'env'
    assert held.read_text() == secrets.read_text() and held.stat().st_mode & 0o77 == 0
    assert not (home / 'jaxrl_sched.env').exists()

  machine.run('tpu_vm.sh', 'run', 'my-tpu', '--', *RUN, *NASTY)
  for worker in range(2):
    machine.wait_for(1, worker)
    told = ['jaxrl_sched.train', *RUN, *NASTY, '--stopped-exit-code=75']
    assert machine.started(worker) == [told]
    variables = machine.variables(worker)
    assert (
      variables['HF_TOKEN'] == "hf_x 'y' $(id)" and variables['WANDB_API_KEY'] == 'w'
    )
  again = machine.run('tpu_vm.sh', 'run', 'my-tpu', '--', *RUN, code=1)
  assert again.count('a run is going on here already') == 2
  refused = machine.run('tpu_vm.sh', 'setup', 'my-tpu', code=1)
  assert 'stop it first' in refused

  lines = machine.run('tpu_vm.sh', 'status', 'my-tpu').splitlines()
  assert lines[0] == '== my-tpu in us-test1-a: ACTIVE'
  assert lines[2] == f'worker 1: running, commit {commit}: process 1: wait'
  logs = ['logs', 'my-tpu', '--no-follow', '--lines=5']
  assert machine.run('tpu_vm.sh', *logs) == 'worker 0: process 0: wait\n'
  assert 'worker 1: process 1' in machine.run('tpu_vm.sh', *logs, '--worker=all')
  machine.run('tpu_vm.sh', 'logs', 'my-tpu', '--worker=2-3')  # there are none of these

  output = machine.run('tpu_vm.sh', 'stop', 'my-tpu', '--delete', '--timeout=20')
  assert output.count('stopped, exit code 75') == 2 and 'being deleted' in output
  calls = machine.calls()
  scp = ['gcloud', 'compute', 'tpus', 'tpu-vm', 'scp']
  assert calls[0][:5] == scp and calls[0][7:] == ['my-tpu:', '--worker=all', *PLACE]
  sent = [pathlib.Path(path).name for path in calls[0][5:7]]
  assert sent == ['jaxrl_sched.tar.gz', 'jaxrl_sched.env']
  assert _ssh('status') in calls and _ssh('stop 20') in calls
  assert _ssh('logs 5', worker='0') in calls
  assert _ssh('logs 100 follow', worker='2-3') in calls
  delete = ['gcloud', 'compute', 'tpus', 'queued-resources', 'delete', 'my-tpu']
  assert calls[-1] == [*delete, '--force', '--async', *PLACE]
  assert not any('hf_x' in word for call in calls for word in call)


def _git(folder: pathlib.Path, *words: str) -> str:
  return subprocess.run(
    ['git', *words], cwd=folder, check=True, capture_output=True, text=True
  ).stdout


def test_workers_whose_environments_differ_are_refused(machine):
  (machine.homes[1] / 'freeze').write_text('jax==0.10.3\n')
  output = machine.run('tpu_vm.sh', 'setup', 'my-tpu', code=1)
  assert "the workers' environments differ" in output


def test_what_is_not_active_is_said(machine):
  machine.states('SUSPENDED')
  for arguments in (['setup', 'a'], ['run', 'a', '--', *RUN]):
    assert 'SUSPENDED' in machine.run('tpu_vm.sh', *arguments, code=1)
  machine.states('FAILED')
  assert 'a in us-test1-a: FAILED' in machine.run('tpu_vm.sh', 'status', 'a')
  machine.states('NOT_FOUND')
  assert 'a in us-test1-a: ABSENT' in machine.run('tpu_vm.sh', 'status', 'a')
  assert 'ABSENT' in machine.run('tpu_vm.sh', 'stop', 'a', '--delete')
  machine.states('BROKEN')
  output = machine.run('tpu_vm.sh', 'stop', 'a', '--delete', code=1)
  assert 'no credentials' in output
  assert machine.calls() == []


def test_workers_that_do_not_stop_are_named_and_not_deleted(machine):
  machine.codes('deaf')
  machine.run('tpu_vm.sh', 'setup', 'my-tpu')
  machine.run('tpu_vm.sh', 'run', 'my-tpu', '--module=evaluate', '--', RUN[1])
  machine.wait_for(1, 1)
  assert machine.started(1) == [['jaxrl_sched.evaluate', RUN[1]]]
  stop = ['stop', 'my-tpu', '--delete']
  output = machine.run('tpu_vm.sh', *stop, '--timeout=0', code=1)
  assert 'worker 1: still running after 0 s' in output and 'still billed' in output
  assert 'killed' in machine.run('tpu_vm.sh', *stop, '--kill')
  assert [call[4] for call in machine.calls()].count('delete') == 1


KEEP = ['run', 'my-tpu', '--keep', '--accelerator-type=v5litepod-16', '--spot']


def test_keep_makes_a_preempted_slice_again_and_goes_on(machine):
  """Once to its preemption, once to its end; each time created, set up and started."""
  machine.states('NOT_FOUND', 'PROVISIONING', *['ACTIVE'] * 3, 'SUSPENDED', 'NOT_FOUND')
  with open(machine.folder / 'states', 'a') as file:
    file.write('PROVISIONING\nACTIVE\n')
  machine.codes('wait', '0')
  output = machine.run('tpu_vm.sh', *KEEP, '--', *RUN, *NASTY)
  assert 'complete' in output and 'still billed' in output
  told = ['jaxrl_sched.train', *RUN, *NASTY, '--stopped-exit-code=75']
  assert machine.started(0) == machine.started(1) == [told, told]
  calls = [call[4] for call in machine.calls()]
  assert calls.count('create') == 2 and calls.count('delete') == 1
  assert calls.count('scp') == 2


@pytest.mark.parametrize('code, said', [('2', 'ended with 2'), ('126', 'with 126')])
def test_keep_ends_with_a_run_that_cannot_go_on(machine, code, said):
  machine.run('tpu_vm.sh', 'setup', 'my-tpu')
  machine.codes(code)
  assert said in machine.run('tpu_vm.sh', *KEEP, '--', *RUN, code=int(code))


def test_keep_starts_again_on_a_worker_that_lost_the_run_but_not_what_was_stopped(
  machine,
):
  machine.run('tpu_vm.sh', 'setup', 'my-tpu')
  machine.codes('wait')
  keep = machine.start('tpu_vm.sh', *KEEP, '--', *RUN)
  machine.wait_for(1, 1)
  pid = (machine.homes[1] / 'jaxrl_sched_state' / 'pid').read_text()
  os.kill(int(pid), signal.SIGTERM)
  machine.wait_for(2, 1)
  machine.run('tpu_vm.sh', 'stop', 'my-tpu')
  output, _ = keep.communicate(timeout=20)
  assert keep.returncode == 75 and 'ended with 75' in output
  assert len(machine.started(0)) == 1


# ---- supervise.sh


def _supervise(machine, *options: str, **popen):
  workdir = f'--workdir={machine.play}/run'
  command = [FAKES / 'python', '-m', 'jaxrl_sched.train', workdir]
  env = {'JAXRL_PYTHON': sys.executable}
  return machine.start('supervise.sh', '--pause=0', *options, '--', *command, **env)


@pytest.mark.parametrize(
  'codes, starts, code',
  [
    ('0', 1, 0),
    ('2', 1, 2),
    ('127', 1, 127),
    ('75 1 75 1 0', 5, 0),
    ('KILL ABRT 0', 3, 0),  # however a process dies, it starts again
    ('1 2', 2, 2),
    ('75 75 75 75 75 75 0', 7, 0),  # stopping is no failure
    ('1', 3, 1),
    ('1 1 75 KILL', 4, 137),
    ('1 1 step 1 1', 5, 1),  # a new checkpoint: counted anew, from its failure on
  ],
)
def test_supervise_starts_again_what_was_stopped_or_failed(
  machine, codes, starts, code
):
  machine.codes(*codes.split())
  process = _supervise(machine, '--failures=3')
  output, _ = process.communicate(timeout=20)
  assert process.returncode == code, output
  assert len(machine.started()) == starts
  assert ('giving up' in output) == (codes.split()[-1] in ('1', 'KILL'))


def test_supervise_passes_sigterm_on_and_ends_with_what_it_led_to(machine):
  machine.codes('wait')
  state = machine.folder / 'state'
  process = _supervise(machine, f'--state={state}')
  machine.wait_for(1)
  assert int((state / 'pid').read_text()) == process.pid
  second = _supervise(machine, f'--state={state}')
  assert 'running there already' in second.communicate(timeout=20)[0]
  assert second.returncode == 2
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=20)
  assert process.returncode == 75 and output == 'process 0: wait\nsaving\n'
  assert (state / 'exit').read_text() == '75\n' and len(machine.started()) == 1


def test_supervise_stops_in_a_pause(machine):
  machine.codes('1')
  process = _supervise(machine, '--pause=300')
  assert (
    'starting again in 300 s' in process.stdout.readline() + process.stdout.readline()
  )
  process.send_signal(signal.SIGINT)
  process.communicate(timeout=5)
  assert process.returncode == 75 and len(machine.started()) == 1


def test_pauses_double(machine):
  machine.codes('1')
  sleeps = machine.folder / 'bin'
  sleeps.mkdir()
  (sleeps / 'sleep').write_text(f'#!/bin/sh\necho "$1" >>{sleeps}/slept\n')
  (sleeps / 'sleep').chmod(0o755)
  env = {'PATH': f'{sleeps}:{machine.env["PATH"]}'}
  command = [FAKES / 'python', '-m', 'jaxrl_sched.train']
  machine.run('supervise.sh', '--failures=7', '--', *command, code=1, **env)
  assert (sleeps / 'slept').read_text().split() == [
    '10',
    '20',
    '40',
    '80',
    '160',
    '320',
  ]


@pytest.mark.parametrize(
  'options', [['--failures=0'], ['--pause=x'], ['--what'], ['--']]
)
def test_supervise_refuses(machine, options):
  assert machine.run('supervise.sh', *options, code=2).startswith('error: ')


# ---- local_processes.sh


def test_local_processes_are_told_who_they_are(machine):
  """Variables, arguments and folder of each; what they print, on the screen and kept."""
  arguments = ['--devices-each=2', '--logs=kept', '--', *RUN, *NASTY]
  output = machine.run('local_processes.sh', 3, *arguments)
  assert sorted(output.splitlines()) == [f'[{i}] process {i}: 0' for i in range(3)]
  addresses = set()
  for i in range(3):
    assert machine.started(i) == [['jaxrl_sched.train', *RUN, *NASTY]]
    variables = machine.variables(i)
    assert variables['JAX_PROCESS_ID'] == str(i) and variables['JAX_PLATFORMS'] == 'cpu'
    assert variables['JAX_NUM_PROCESSES'] == '3'
    assert variables['JAX_NUM_CPU_DEVICES'] == '2'
    assert variables['PWD'] == str(machine.folder)
    addresses.add(variables['JAX_COORDINATOR_ADDRESS'])
    assert (machine.folder / 'kept' / f'{i}.log').read_text() == f'process {i}: 0\n'
  assert len(addresses) == 1 and re.fullmatch(r'127\.0\.0\.1:\d+', addresses.pop())


def test_the_first_failure_is_the_exit_code_and_the_others_are_not_waited_for(machine):
  machine.codes('3', process='1')
  machine.codes('deaf')
  output = machine.run('local_processes.sh', 3, '--patience=1', '--', *RUN, code=3)
  assert 'process 1 ended with exit code 3' in output
  assert 'process 2 ended with exit code 137' in output
  assert '2 still running after 1 s: killed' in output


@pytest.mark.slow
@pytest.mark.parametrize('how', ['SIGTERM', 'Ctrl-C'])
def test_a_signal_goes_to_all_processes(machine, how):
  machine.codes('wait')
  process = machine.start('local_processes.sh', 2, '--', *RUN)
  for i in range(2):
    machine.wait_for(1, i)
  if how == 'SIGTERM':
    process.terminate()
  else:  # as a terminal sends it: to all that is in the foreground
    os.killpg(process.pid, signal.SIGINT)
  output, _ = process.communicate(timeout=20)
  assert process.returncode == 75
  assert '[0] saving' in output and '[1] saving' in output


def test_local_processes_start_again_together(machine):
  machine.codes('KILL', '75', '0', process='0')
  machine.codes('1', '75', '0', process='1')
  pause = machine.folder / 'bin'
  pause.mkdir()
  (pause / 'sleep').write_text('#!/bin/sh\nexec /bin/sleep 0.1\n')
  (pause / 'sleep').chmod(0o755)
  env = {'PATH': f'{pause}:{machine.env["PATH"]}'}
  machine.run('local_processes.sh', 2, '--restart', '--', *RUN, *NASTY, **env)
  told = ['jaxrl_sched.train', *RUN, *NASTY, '--stopped-exit-code=75']
  assert machine.started(0) == machine.started(1) == [told] * 3


@pytest.mark.parametrize(
  'arguments, message',
  [
    ([], "N ''"),
    (['0', '--'], "N '0'"),
    (['2'], "no '--'"),
    (['2', '--devices-each=x', '--'], '--devices-each=x'),
    (['2', '--config=a', '--'], '--config=a: unknown argument'),
  ],
)
def test_local_processes_refuses(machine, arguments, message):
  assert message in machine.run('local_processes.sh', *arguments, code=2)


# ---- gke_xpk.sh

GKE = ['--cluster=my-cluster']
GKE_PLACE = ['--cluster=my-cluster', *PLACE[:2]]


def test_create_asks_for_a_workload(machine):
  options = [*GKE, '--tpu-type=v6e-16', '--num-slices=2', '--priority=high']
  options += ['--max-restarts=3', '--extras=math', '--env-file=a.env']
  (machine.folder / 'a.env').write_text('HF_TOKEN=x\n')
  options += ['--xpk-flag=--spot']
  machine.run('gke_xpk.sh', 'create', 'my-run', *options, '--', *RUN, *NASTY)
  [call] = machine.calls()
  command = call.pop(-5)
  assert call == [
    *('xpk', 'workload', 'create', '--workload=my-run', '--tpu-type=v6e-16'),
    *('--num-slices=2', '--base-docker-image=python:3.11'),
    *(f'--script-dir={machine.repository}', '--priority=high', '--max-restarts=3'),
    *('--restart-on-exit-codes=75', '--termination-grace-period-seconds=300'),
    *(f'--env-file={machine.folder}/a.env', *GKE_PLACE, '--spot'),
  ]
  assert command.startswith(
    '--command=exec bash launch/worker.sh pod \\[tpu\\,gcs\\,math\\] '
  )


def test_the_command_of_a_pod_arrives_as_given(machine):
  """Through XPK's own lines of bash, in an image that has the package."""
  options = [*GKE, '--tpu-type=v6e-16', '--docker-image=mine', '--xpk-flag=--spot']
  machine.run('gke_xpk.sh', 'create', 'my-run', *options, '--', *RUN, *NASTY)
  [call] = machine.calls()
  assert '--docker-image=mine' in call and not any('--script-dir' in w for w in call)
  [command] = [word.split('=', 1)[1] for word in call if word.startswith('--command=')]
  image = machine.folder / 'image'
  image.mkdir()
  (image / 'python3').symlink_to(FAKES / 'python')
  env = machine.env | {'PATH': f'{image}:{machine.env["PATH"]}', 'JAXRL_PYTHON': ''}
  # No `$` may be left that Kubernetes would read as a variable of its own.
  assert not re.search(r'\$[$(]', command)
  lines = f'({command}) & PID=$!\nwait $PID\nexit $?'
  run = subprocess.run(
    ['bash', '-c', lines], cwd=machine.repository, env=env, timeout=20
  )
  assert run.returncode == 0
  assert machine.started() == [
    ['jaxrl_sched.train', *RUN, *NASTY, '--stopped-exit-code=75']
  ]


def test_list_logs_and_delete_of_workloads(machine):
  machine.run('gke_xpk.sh', 'list', *GKE)
  machine.run('gke_xpk.sh', 'logs', 'my-run', '--lines=7', XPK_CLUSTER='my-cluster')
  machine.run('gke_xpk.sh', 'delete', 'my-run', *GKE, TPU_ZONE='', TPU_PROJECT='')
  assert machine.calls() == [
    ['xpk', 'workload', 'list', *GKE_PLACE],
    ['xpk', 'workload', 'list', '--filter-by-job=my-run', *GKE_PLACE],
    ['kubectl', 'logs', '--selector=xpk.google.com/workload=my-run', '--prefix']
    + ['--tail=7', '--max-log-requests=1000', '--follow'],
    ['xpk', 'workload', 'delete', '--workload=my-run', *GKE],
  ]


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['launch', 'a'], "'launch': expected create"),
    (['create', 'A', *GKE], "NAME 'A'"),
    (['create', 'a' * 41, *GKE], "NAME 'aaa"),
    (['create', 'a', '--tpu-type=b', '--', *RUN], 'no cluster'),
    (['create', 'a', *GKE, '--', *RUN], 'no --tpu-type='),
    (['create', 'a', *GKE, '--tpu-type=b'], 'no --workdir='),
    (['create', 'a', *GKE, '--tpu-type=b', '--num-slices=0', '--', *RUN], 'slices=0'),
    (['create', 'a', *GKE, '--tpu-type=b', '--max-restarts=-1', '--', *RUN], '=-1'),
    (
      ['create', 'a', *GKE, '--tpu-type=b', '--docker-image=c', '--extras=math'],
      '--docker-image excludes',
    ),
    (['create', 'a', *GKE, '--tpu-type=b', '--', *RUN, 'a\nb'], 'a line break'),
    (
      ['create', 'a', *GKE, '--tpu-type=b', '--', '--config=no.py', RUN[1]],
      '--config=no.py: no such file',
    ),
    (['delete', 'a', *GKE, '--lines=3'], '--lines=3: unknown to delete'),
    (['delete', 'a', *GKE, '--', 'x'], 'takes nothing after it'),
  ],
)
def test_gke_refuses(machine, arguments, message):
  output = machine.run('gke_xpk.sh', *arguments, code=2)
  assert output.startswith('error: ') and message in output and machine.calls() == []


# ---- all of them


def test_scripts_are_clean_to_shellcheck():
  beside = pathlib.Path(sys.executable).with_name('shellcheck')
  shellcheck = str(beside) if beside.exists() else shutil.which('shellcheck')
  assert shellcheck, 'no shellcheck: it comes with the extra test'
  scripts = [*(ROOT / 'launch').glob('*.sh'), *FAKES.iterdir()]
  run = subprocess.run(
    [shellcheck, '-x', *scripts], cwd=ROOT, capture_output=True, text=True
  )
  assert run.returncode == 0, run.stdout


def test_the_versions_that_pods_install_are_ones_that_the_package_takes():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  extras = project['optional-dependencies']
  wanted = list(project['dependencies'])
  for extra in ('tpu', 'gcs', 'gym', 'math', 'parquet', 'wandb'):
    wanted += extras[extra]
  lines = (ROOT / 'launch' / 'constraints.txt').read_text().splitlines()
  pins = dict(line.split('==') for line in lines if not line.startswith('#'))
  versions = {re.sub('[-_.]+', '-', name).lower(): pin for name, pin in pins.items()}
  for requirement in map(Requirement, wanted):
    name = re.sub('[-_.]+', '-', requirement.name).lower()
    assert versions[name] in requirement.specifier, f'{requirement}: {versions[name]}'
  assert versions['libtpu'].startswith('0.0.42.')  # what jax 0.10.2 names
  assert all('+' not in pin for pin in pins.values())
