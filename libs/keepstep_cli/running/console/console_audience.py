"""Print the output of ranks and the messages of the supervisor, and write both to files if a folder is given."""

from __future__ import annotations

import sys
from pathlib import Path

from keepstep_cli.running.console.log_folder import LogFolder
from keepstep_cli.running.console.output import PrefixedOutput


class ConsoleAudience:
    """Print the output of ranks to the same stream, and messages of the supervisor to standard error.

    Raises BrokenPipeError when the reader has closed the stream. Output that a full disk rejects is lost.

    Args:
        timestamps: begin each line with the time.
        log_dir: folder for a file of each rank, and ``run.log`` with the messages; None: no files.
    """

    def __init__(self, *, timestamps: bool = False, log_dir: Path | None = None) -> None:
        self._out = PrefixedOutput(sys.stdout, timestamps=timestamps)
        self._err = PrefixedOutput(sys.stderr, timestamps=timestamps)
        self._files = None if log_dir is None else LogFolder(log_dir)
        self._out_fails = False

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None:
        if self._files is not None and (problem := self._files.line(group, rank, text)):
            self.note("run", problem)
        if error:
            self._write_error(group, rank, text)
            return
        try:
            self._out.write(group, rank, text)
            self._out_fails = False
        except BrokenPipeError:
            raise
        except OSError as reason:
            if not self._out_fails:
                self._out_fails = True
                self.note("run", f"cannot write to standard output ({reason.strerror}): output of ranks is lost")

    def note(self, group: str, sentence: str) -> None:
        if self._files is not None:
            self._files.note(group, sentence)
        self._write_error(group, None, sentence)

    def close(self) -> None:
        """Close the files."""
        if self._files is not None:
            self._files.close()

    def _write_error(self, group: str, rank: int | None, text: str) -> None:
        """Write to standard error, and ignore errors: no other stream is left to report them."""
        try:
            self._err.write(group, rank, text)
        except BrokenPipeError:
            raise
        except OSError:
            pass
