"""Keep a template process, and start ranks from it. ``fitness`` decides which starts may be warm.

The template is a child of this process that has the command of a rank, and a ``sitecustomize`` of ours
(``template_forks``). It is made when a rank has told what it imported, in the background, and made again after it ended
or a file changed. All starts until then are cold. Ranks are children of this process: it becomes a subreaper, and reaps
the orphans that come to it.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from keepstep_cli.running import ranks
from keepstep_cli.running.console.output import read_lines
from keepstep_cli.running.warm import fitness, process_facts, template_forks
from keepstep_cli.running.warm.template_imports import Orders, Report
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.text import bytes_text

PR_SET_CHILD_SUBREAPER = 36
TEMPLATE_FORK_SECONDS = 5.0
"""Limit for one start; then it is cold, and the template is made again."""
IMPORT_SECONDS = 900.0
"""Limit for all imports of the template."""
MOST_TEMPLATES = 6
"""Templates that are tried in a row, each without the modules that the one before could not import."""
PIPE = "learned"
"""Of ``keepstep.runtime.learned_imports``."""
AGAIN = Backoff(first=1.0, most=60.0)
"""Delay before a template that ended is made again."""
LAST_LINES = 5
LOOK_AGAIN_SECONDS = 0.1
"""Time for which files that were looked at, except the script, count as unchanged: ranks of a group start together."""


@dataclass
class Template:
    """A process that imports, or has imported."""

    process: ranks.RankProcess
    connection: socket.socket
    environment: Mapping[str, str]
    facts: process_facts.Facts
    installations: process_facts.Facts
    files: dict[str, tuple[int, int] | None]
    """Of Python, the script and, when it is ready, of its modules."""
    began: float
    unchanged_at: float = 0.0
    """When its files were last looked at, on the monotonic clock."""
    report: Report | None = None
    """None: it still imports."""
    said: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    over: bool = False


class WarmStarts:
    """Starts of ranks from a template.

    Args:
        command: of each rank.
        environments: returns those of all ranks, for a first start and a restart. That of rank 0 of the first group
            comes first.
        folder: private folder in which ranks write what they have imported. It must not exist.
        preload: modules to import in addition.
        note: gets messages for the operator.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Callable[[], Sequence[Mapping[str, str]]],
        folder: Path,
        preload: Sequence[str],
        note: Callable[[str], None],
    ) -> None:
        self._command = tuple(command)
        self._environments = environments
        self._folder = folder
        self._preload = tuple(preload)
        self._note = note
        self._noted: set[str] = set()
        self._script = fitness.script_of(command, sys.executable, _is_this_python(command[0]))
        self._template: Template | None = None
        self._processes: list[ranks.RankProcess] = []
        """Templates that have not been reaped."""
        self._adopts = False
        """This process is a subreaper."""
        self._learned: fitness.Learned | None = None
        self._excluded: set[str] = set()
        self._set_by_left_out: set[str] = set()
        """Variables that modules which are left out set, when torch had been imported."""
        self._first_problem = ""
        self._tries = 0
        self._ended = 0
        """Templates in a row that ended by themselves."""
        self._given_up = False
        self._script_file: tuple[int, int] | None = None
        """At the last cold start."""
        self._work: asyncio.TaskGroup
        self._closed = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._pipe = -1
        folder.mkdir()
        os.mkfifo(folder / PIPE)

    def settled(self) -> bool:
        """Whether ranks start warm now, or are known to stay cold."""
        return self._given_up or (self._template is not None and self._template.report is not None)

    async def run(self) -> None:
        """Learn and make templates until ``close``."""
        if (reason := self._impossible()) is not None:
            self._given_up = True
            if self._preload:
                self._tell(f"all starts are cold: {reason}")
            return
        loop = asyncio.get_running_loop()
        self._pipe = os.open(self._folder / PIPE, os.O_RDWR | os.O_NONBLOCK)
        loop.add_reader(self._pipe, self._read_pipe)
        try:
            async with asyncio.TaskGroup() as self._work:
                if self._preload:
                    self._make()
                await self._closed.wait()
                self._end_template()
        finally:
            loop.remove_reader(self._pipe)
            os.close(self._pipe)

    def close(self) -> None:
        """End the template."""
        self._closed.set()
        self._given_up = True
        if self._later is not None:
            self._later.cancel()

    def _impossible(self) -> str | None:
        if sys.platform != "linux":
            return "they need Linux"
        if self._script is None:
            return "the program is not a script of this Python"
        if (variable := fitness.tracing(self._environments()[0])) is not None:
            return f"{variable} is set"
        return None

    def _tell(self, sentence: str) -> None:
        """Note a sentence once."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._note(sentence)

    # ---- what to import

    def _read_pipe(self) -> None:
        try:
            names = os.read(self._pipe, 1 << 16).decode(errors="replace").split()
        except BlockingIOError:
            return
        for name in names:
            path = self._folder / Path(name).name
            try:
                told = json.loads(path.read_text())
                path.unlink()
                modules = tuple((str(module), str(origin)) for module, origin in told["modules"])
                learned = fitness.Learned(modules, tuple(told["names"]), frozenset(told["variables"]))
            except (OSError, ValueError, LookupError, TypeError) as error:
                self._tell(f"the list of imports of a rank cannot be read: {error}")
            else:
                self._learn(learned)

    def _learn(self, learned: fitness.Learned) -> None:
        if self._given_up or self._later is not None or (self._template is not None and self._learned is not None):
            return
        self._learned = learned
        self._excluded, self._tries = set(), 0
        self._end_template()  # one with the modules of --preload only
        self._make()

    # ---- the template

    def _make(self) -> None:
        """Start a template."""
        self._later = None
        if self._given_up or self._template is not None or self._script is None:
            return
        self._tries += 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._adopts = True
        environment, *others = self._environments()
        hook = Path(__file__).with_name("on_path")
        if not os.access(hook / "sitecustomize.py", os.R_OK):  # without it, the template would run the script
            self._give_up(f"{hook / 'sitecustomize.py'} cannot be read")
            return
        ours, theirs = socket.socketpair()
        usual_path = environment.get("PYTHONPATH")
        own = {template_forks.VARIABLE: str(theirs.fileno())}
        own["PYTHONPATH"] = f"{hook}{os.pathsep}{usual_path}" if usual_path else str(hook)
        files = {sys.executable: process_facts.signature(sys.executable)}
        files |= {self._script: self._script_file} if self._script else {}
        facts, installed = process_facts.inherited(), process_facts.installations(sys.path)
        try:
            with theirs:
                child = ranks.started(self._command, {**environment, **own}, pass_fds=(theirs.fileno(),))
            process = ranks.RankProcess(child)
            self._processes.append(process)
            self._template = template = Template(
                process, ours, environment, facts, installed, files, began=time.monotonic()
            )
            standard = str(Path(os.__file__).parent)
            orders = Orders(
                modules=fitness.to_import(self._learned, self._preload, standard),
                learned=[] if self._learned is None else list(self._learned.names),
                excluded=sorted(self._excluded),
                of_ranks=sorted(fitness.differing(environment, others)),
                script=self._script,
                python_path=usual_path,
                supervisor=os.getpid(),
            )
            ours.settimeout(TEMPLATE_FORK_SECONDS)
            template_forks.send(ours, orders)
        except OSError as error:
            ours.close()
            self._template = None
            self._tell(f"restarts are cold: the template process cannot be started: {error}")
            return
        asyncio.get_running_loop().add_reader(ours, partial(self._hear, template))
        self._work.create_task(self._watch(template), name="template")

    async def _watch(self, template: Template) -> None:
        """Discard its output: the script does not run in it. Notice its end."""
        process = template.process
        readers = [asyncio.create_task(read_lines(one, template.said.append)) for one in await process.output()]
        too_long = asyncio.get_running_loop().call_later(IMPORT_SECONDS, self._too_long, template)
        code = await process.wait()
        self._processes.remove(process)
        too_long.cancel()
        _, late = await asyncio.wait(readers, timeout=1.0)
        for one in late:
            one.cancel()
        await asyncio.wait(readers)
        process.close()
        if not template.over:
            self._hear(template)  # its report may be in the socket
        if not template.over:
            self._drop(template)
            last = f": {template.said[-1]}" if template.said and template.report is None else ""
            self._note(
                f"the template process ended (exit code {code}){last}; starts are cold until the next one is ready"
            )
            self._ended += 1
            self._tries = 0
            if template.report is None and self._ended >= MOST_TEMPLATES:
                self._give_up("the template process ends before it has imported all modules")
            else:
                self._later = asyncio.get_running_loop().call_later(AGAIN.seconds(self._ended), self._make)

    def _too_long(self, template: Template) -> None:
        if template.report is None and not template.over:
            self._give_up(f"the template process has not imported all modules in {IMPORT_SECONDS:.0f} s")

    def _hear(self, template: Template) -> None:
        """Read the report of a template."""
        if template.report is not None or template.over:
            return
        try:
            report: Report = template_forks.received(template.connection)[0]
        except (OSError, EOFError, ValueError):
            asyncio.get_running_loop().remove_reader(template.connection)
            return
        if "problems" in report:
            self._drop(template)
            self._leave_out(report)
            return
        asyncio.get_running_loop().remove_reader(template.connection)
        too_late = {one for one in self._set_by_left_out - {*report["read"]} if one.startswith(fitness.OF_TORCH)}
        if names := fitness.set_by_script(self._learned, report["read"], {*report["set"], *too_late}):
            self._give_up(f"the script sets {', '.join(names)}, which its imports read")
            return
        template.report = report
        template.files |= {path: (mtime, size) for path, mtime, size in report["files"]}
        for failed in report["failed"]:
            if failed.split(" ", 1)[0] in self._preload:
                self._tell(f"--preload {failed}")
        seconds = time.monotonic() - template.began
        self._note(
            f"restarts are warm from now on: process {template.process.pid} has imported {report['modules']} modules "
            f"in {seconds:.1f} s, {bytes_text(_resident(template.process.pid))}"
        )

    def _leave_out(self, report: Report) -> None:
        """Make a template without the module that has the problem, and without those that import it."""
        problems = report["problems"]
        self._set_by_left_out |= {*report.get("set", ())}
        if not self._excluded:
            problem, chain = problems[0]
            self._first_problem = f"{chain[-1]} {problem}" if chain else problem
        if report["final"] or self._tries >= MOST_TEMPLATES or any("torch" in chain for _, chain in problems):
            self._give_up(self._first_problem)
            return
        for problem, chain in problems:
            if chain[-1] not in self._excluded:
                self._tell(f"restarts are warm without {chain[-1]}, which {problem}")
            self._excluded |= set(chain)
        self._make()

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._end_template()
        self._tell(f"restarts are cold: {reason}")

    def _end_template(self) -> None:
        if self._template is not None:
            self._drop(self._template)

    def _drop(self, template: Template) -> None:
        template.over = True
        if self._template is template:
            self._template = None
        asyncio.get_running_loop().remove_reader(template.connection)
        template.connection.close()
        template.process.send(9)

    # ---- a start

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> ranks.Child | None:
        """Start a rank from the template. None: it must be a cold start."""
        template = self._template
        script_file = process_facts.signature(self._script) if self._script else None
        if template is None or template.report is None or tuple(command) != self._command:
            child = None
        elif (reason := self._changed(template)) is not None:
            self._note(f"{reason}: this start is cold, and later ones are warm again when it has committed a step")
            self._drop(template)
            self._script_file = script_file
            if self._learned is None:
                self._make()
            child = None
        elif (reason := self._differs(template, environment)) is not None:
            self._tell(f"some starts are cold: {reason}")
            child = None
        else:
            child = self._forked(template, environment)
        if child is None:
            self._script_file = script_file
        return child

    def _changed(self, template: Template) -> str | None:
        """Return what has changed on disk, in this process or in the template, as a sentence."""
        if _is_stopped(template.process.pid):  # else a start would wait for it, and so would all of this process
            return "the template process has been stopped by a signal"
        if (name := process_facts.difference(template.facts, process_facts.inherited())) is not None:
            return f"{name} of `keepstep run` has changed"
        recent = time.monotonic() < template.unchanged_at + LOOK_AGAIN_SECONDS
        for path, before in template.files.items():
            if recent and path != self._script:
                continue
            if process_facts.signature(path) != before:
                return f"{path} has changed"
        if recent:
            return None
        if process_facts.installations(sys.path) != template.installations:
            return "the installed packages have changed"
        template.unchanged_at = time.monotonic()
        return None

    def _differs(self, template: Template, environment: Mapping[str, str]) -> str | None:
        assert template.report is not None
        name = fitness.differing_variable(template.environment, environment, template.report["read"])
        return None if name is None else f"{name} differs, which their imports read"

    def _forked(self, template: Template, environment: Mapping[str, str]) -> ranks.Child | None:
        (output, their_output), (errors, their_errors), (may_go, let_go) = _pipes(3)
        try:
            try:
                start = template_forks.Start(environment=dict(environment))
                body = json.dumps(start).encode()
                socket.send_fds(
                    template.connection,
                    [len(body).to_bytes(template_forks.LENGTH_BYTES)],
                    [their_output, their_errors, may_go],
                )
                template.connection.sendall(body)
                pid = int.from_bytes(template.connection.recv(template_forks.LENGTH_BYTES, socket.MSG_WAITALL))
            finally:
                for one in (their_output, their_errors, may_go):
                    os.close(one)
            if pid == 0:
                raise OSError("it has ended")
            os.write(let_go, template_forks.GO)
        except OSError as error:
            os.close(output)
            os.close(errors)
            self._note(f"the template process does not start a rank ({error or type(error).__name__}): cold start")
            self._drop(template)
            self._later = asyncio.get_running_loop().call_later(AGAIN.first, self._make)
            return None
        finally:
            os.close(let_go)
        self._ended = 0
        return ranks.Child(pid, os.fdopen(output, "rb", 0), os.fdopen(errors, "rb", 0), partial(_reap, pid))

    def look(self, known: set[int]) -> None:
        """Notice the end of the template, and reap the orphans of ranks. Call it on SIGCHLD.

        Args:
            known: children that others reap.
        """
        for one in tuple(self._processes):
            one.look()
        templates = {one.pid for one in self._processes}
        while self._adopts:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in known | templates:
                return
            os.waitpid(ended.si_pid, 0)


def _pipes(count: int) -> list[tuple[int, int]]:
    """Open pipes, or none: what stayed open would be missing at the next try. OSError: no descriptor is left."""
    found: list[tuple[int, int]] = []
    try:
        found.extend(os.pipe() for _ in range(count))
    except OSError:
        for one in itertools.chain(*found):
            os.close(one)
        raise
    return found


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _is_this_python(program: str) -> bool:
    """Whether a command starts the Python of this environment, by another of its names."""
    found = shutil.which(program)
    if found is None or not Path(found).name.startswith("python"):
        return False
    own = Path(sys.executable)
    return Path(found).parent.resolve() == own.parent.resolve() and Path(found).resolve() == own.resolve()
