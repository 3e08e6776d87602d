"""Waiting time of threads for processors is counted, if the system reports it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdraft.framework.util import contention
from crossdraft.framework.util.contention import CpuWait

CPU = torch.device("cpu")
needs_linux = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count it")


@needs_linux
def test_two_programs_on_one_processor_wait_for_each_other() -> None:
    program = f"""
import os, time
from types import SimpleNamespace
from {contention.__name__} import CpuWait
os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})
waiting = CpuWait(SimpleNamespace(type="cpu"))
waiting.start()
if not os.fork():
    end = time.monotonic() + 1
    while time.monotonic() < end: pass
    os._exit(0)
begun = time.monotonic()
while time.monotonic() < begun + 0.5: pass
print(waiting.since(), time.monotonic() - begun)
os.wait()
waiting.since()
begun = time.monotonic()
time.sleep(0.2)
print(waiting.since(), time.monotonic() - begun)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    busy, spinning, asleep, slept = map(float, done.stdout.split())
    assert 0.1 < busy <= spinning + 0.1, "half of the half second, more where the machine has others"
    assert asleep < slept - 0.1, "who sleeps does not wait"


def test_other_devices_are_not_waited_for(monkeypatch: Any) -> None:
    other = CpuWait(torch.device("meta"))
    other.start()
    assert other.since() == 0.0
    monkeypatch.setattr(contention, "_THREADS", Path("/nowhere"))
    nothing = CpuWait(CPU)
    nothing.start()
    assert nothing.since() == 0.0


@needs_linux
def test_files_are_closed_again() -> None:
    before = len(os.listdir("/proc/self/fd"))
    one = CpuWait(CPU)
    for _ in range(3):
        one.start()
        time.sleep(0.001)
        assert one.since() >= 0
    one.close()
    assert len(os.listdir("/proc/self/fd")) == before and one.since() == 0.0
