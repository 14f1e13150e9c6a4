"""`deploy/slurm/train.sbatch` under a Slurm of its own, where Debian's is installed."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_runs import training_records, write_run

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "train.sbatch"
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
LACKING = [name for name in NEEDED if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
NODES = ("localhost", socket.gethostname().partition(".")[0])
"""Two names of this machine."""
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a Slurm with two nodes, which all of its commands take."""
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(folder=folder, ports=free_ports(3), host=NODES[1]))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    places = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={folder}/munge.{name}" for option, name in places.items()]
    started = [
        subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
        for words in (
            ["/usr/sbin/munged", "--foreground", "--force", f"--key-file={key}", *munge],
            ["/usr/sbin/slurmctld", "-D", "-f", str(config)],
            *(["/usr/sbin/slurmd", "-D", "-f", str(config), "-N", one] for one in NODES),
        )
    ]
    yield environment
    for process in reversed(started):
        process.terminate()
        process.wait(30)


@pytest.mark.long
@pytest.mark.skipif(bool(LACKING), reason=f"needs Debian's slurm-wlm: {', '.join(LACKING)}")
@pytest.mark.skipif(os.getuid() != 0, reason="daemons of Slurm run as root")
def test_a_job_has_a_launcher_on_each_node(slurm: dict[str, str], tmp_path: Path):
    path, steps = write_run(tmp_path), ("--set", "run.steps=2", "--set", "run.evaluate_every=0")
    folder = str(Path(sys.executable).parent)
    environment = slurm | {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    words = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1"]
    words += [f"--output={tmp_path}/job.log", f"--chdir={tmp_path}"]
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            [*words, str(EXAMPLE), str(path), *steps],
            env=environment,
            capture_output=True,
            text=True,
        )
        # the daemons may not be up yet
        if "Submitted" in done.stdout or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    said = (tmp_path / "job.log").read_text() if (tmp_path / "job.log").exists() else ""
    assert done.returncode == 0, (done.stderr, said)
    taken = [one["step"] for one in training_records(tmp_path / "out") if "loss" in one]
    assert taken == [1, 2]
    assert said.count("what was trained") == 1, said
