"""Processes begin as a group, and end together: all well, or none left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import members
import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

import loopwright
from loopwright.distributed.launch import launch


def test_processes_know_each_other(tmp_path):
    assert launch(2, members.report, (str(tmp_path),)) == 0
    assert (tmp_path / "0").read_text() == "2 1 0 2 2 True 3.0 41 (True, False)"
    assert (tmp_path / "1").read_text() == "2 1 1 2 2 False 3.0 41 (True, False)"


@pytest.mark.parametrize(("how", "status"), [("exit", 2), ("interrupt", 130), ("kill", -signal.SIGKILL)])
def test_when_one_fails_the_others_are_ended_and_its_status_told(how, status):
    begun = time.monotonic()
    assert launch(2, members.fail, (how,)) == status
    assert time.monotonic() - begun < 50, "the other would have taken a minute"


def test_an_exception_is_raised_here_with_its_traceback():
    with pytest.raises(ProcessRaisedException, match="RuntimeError: spoilt"):
        launch(2, members.fail, ("raise",))


def test_an_interrupt_reaches_all_and_they_are_waited_for(tmp_path):
    paths = [Path(loopwright.__file__).parents[1], Path(members.__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    process = subprocess.Popen([sys.executable, members.__file__, str(tmp_path)], env=environment)
    try:
        while len(list(tmp_path.iterdir())) < 2 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
