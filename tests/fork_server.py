"""Runs Python programs in forks of a process that has imported torch, most of a program's start.

``python -m tests.fork_server FD`` serves one client at the socket FD, one program at a time.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

LONGEST = 1 << 20
"""Bytes of a request."""


def serve(line: socket.socket) -> dict[str, Any]:
    """Fork for every request; return only in the forks, with what is to be run there."""
    while True:
        request, streams, _, _ = socket.recv_fds(line, LONGEST, 3)
        if not request:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            line.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            job: dict[str, Any] = json.loads(request)
            return job
        for stream in streams:
            os.close(stream)
        line.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        line.send(str(os.waitstatus_to_exitcode(status)).encode())


def run(words: list[str]) -> None:
    """Do what ``python`` does with these words: ``-c CODE …``, ``-m MODULE …`` or ``FILE …``."""
    option, rest = (words[0], words[1:]) if words[0] in {"-c", "-m"} else ("", words)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if option == "-m":
        sys.argv, sys.path[0] = ["-m", *rest[1:]], str(Path.cwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif option == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        path = Path.cwd() / rest[0]
        sys.argv, sys.path[0] = rest, str(path.resolve().parent)
        main.__file__ = str(path)
        exec(compile(path.read_bytes(), path, "exec"), main.__dict__)


def end(error: BaseException) -> None:
    """End as Python does after this exception, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)


if __name__ == "__main__":
    import torch  # noqa: F401

    # The end of each fork collects garbage several times: through all of torch in half a second.
    gc.collect()
    gc.freeze()
    job = serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    try:
        run(job["words"])
    except SystemExit:
        raise
    except BaseException as error:
        end(error)
