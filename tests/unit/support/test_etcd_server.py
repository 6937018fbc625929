"""The etcd of tests."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

PARENT = """
import sys
from pathlib import Path
from tests.support.services.etcd_server import EtcdCluster
with EtcdCluster(Path(sys.argv[1])) as cluster:
    print(cluster.nodes[0].pid, flush=True)
    sys.stdin.read()
"""
DEADLINE = 30.0


def test_etcd_ends_with_a_test_run_that_is_killed(tmp_path: Path, repository: Path) -> None:
    command = [sys.executable, "-c", PARENT, tmp_path]
    with subprocess.Popen(command, cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        etcd = os.pidfd_open(pid)
        try:
            parent.kill()
            ended, _, _ = select.select([etcd], [], [], DEADLINE)
            assert ended
        finally:
            os.close(etcd)
