import subprocess
import sys

SCRIPT = """
import datetime, sys
from keepstep.one_copy import OneCopy
moment = datetime.timedelta(milliseconds=50)
before = "torch._dynamo" in sys.modules
try:
    OneCopy(lambda mesh: None, lighthouse_addr="http://127.0.0.1:1", connect_timeout=moment)
except TimeoutError:
    print(before, "torch._dynamo" in sys.modules)
"""


def test_a_spare_imports_before_it_waits_what_its_first_optimizer_needs() -> None:
    """Takes seconds: a process of its own imports torch."""
    run = subprocess.run([sys.executable, "-u", "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.split() == ["False", "True"], run.stderr
