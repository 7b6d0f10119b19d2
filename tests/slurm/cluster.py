"""A Slurm of one's own: a controller and two nodes on this machine, in a folder.

Nothing of it touches a Slurm that the machine belongs to: own configuration, ports and folders, and
no authentication beyond the loopback interface.
"""

import os
import re
import shutil
import socket
import subprocess
import time

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
_SBIN = "/usr/sbin:/sbin"
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# A requeued job starts once its old credential has expired: seconds.
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2
PartitionName=usual Nodes=node[1-2] Default=YES State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=node[1-2] State=UP PriorityTier=10
"""


def why_not():
    """Why there can be no cluster here, or an empty string."""
    missing = [name for name in PROGRAMS if _which(name) is None]
    if missing:
        packages = "slurmctld slurmd slurm-client"
        return f"no {missing[0]} on this machine (Debian: apt install {packages})"
    if os.geteuid() != 0:
        return "Slurm's node daemon starts jobs as root only"
    return ""


def _which(name):
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


class Cluster:
    """Started by `with`; jobs run under the folder's configuration."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = []

    def __enter__(self):
        first = _free_ports(3)
        (self.folder / "state").mkdir()
        text = _CONF.format(
            host=socket.gethostname(),
            user="root",
            ports=range(first, first + 3),
            folder=self.folder,
        )
        (self.folder / "slurm.conf").write_text(text)
        for name in ("node1", "node2"):
            (self.folder / name).mkdir()
        # In the foreground (-D), so that they are this process's to end.
        self._start("slurmctld", "-D", "-c")
        for name in ("node1", "node2"):
            self._start("slurmd", "-D", "-N", name)
        self._until(lambda: self.run("sinfo", "-h", "-o", "%t").split() == ["idle"], 30, "nodes")
        return self

    def __exit__(self, *_):
        self.run("scancel", "--user=root", check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(timeout=30)

    def run(self, *words, check=True, cwd=None):
        """Output of a command of Slurm's."""
        done = subprocess.run(
            words, env=self.env, capture_output=True, text=True, check=False, cwd=cwd, timeout=60
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def submit(self, *words, cwd, **variables):
        """The number of a job, submitted with these variables on top of the environment."""
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
        out = self.run("sbatch", "--parsable", f"--export={exported}", *words, cwd=cwd)
        return out.strip()

    def finish(self, job, seconds):
        """Wait for the end of a job and of its requeues; returns its state, such as COMPLETED."""
        found = {}

        def ended():
            text = self.run("scontrol", "show", "job", job, check=False)
            found["states"] = re.findall(r"JobState=(\w+)", text)
            return found["states"] and not set(found["states"]) & {
                *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "PREEMPTED"),
            }

        self._until(ended, seconds, f"end of job {job}")
        return set(found["states"])

    def wait_for(self, path, text, seconds):
        """Until a job's log has the text."""
        self._until(lambda: path.exists() and text in path.read_text(), seconds, text)

    def _start(self, program, *words):
        path = _which(program)
        with open(self.folder / f"{program}.out", "a") as out:
            self._daemons.append(
                subprocess.Popen([path, *words], env=self.env, stdout=out, stderr=out)
            )

    def _until(self, condition, seconds, what):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not there after {seconds} s"
            time.sleep(0.2)


def _free_ports(count):
    """The first of `count` free ports in a row."""
    for first in range(17000, 19000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports from 17000 to 19000")
