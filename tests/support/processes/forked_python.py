# SPDX-License-Identifier: BSD-3-Clause
"""``python(...)``: what a new interpreter makes of a program, in the time of a fork instead of an import of
torch.

One process of this interpreter imports torch and nothing of liger, computes nothing, and forks for every
call: liger is imported anew, with the environment, arguments and path of the call. A program that hides what
torch imports, or that counts modules, needs an interpreter of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path


@cache
def _server():
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def python(*arguments, environment=None, cwd=None):
    """The completed process of ``python ARGUMENTS`` with -c, -m or a file, its output as text."""
    command = [os.fspath(a) for a in arguments]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        request = {
            "command": command,
            "environment": dict(os.environ if environment is None else environment),
            "cwd": os.fspath(cwd or os.getcwd()),
            "files": [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (output, errors)],
        }
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess([sys.executable, *command], status, *texts)


def _forked_for_each_request():
    """In the server: serves until its input ends. Returns, in each child, the request."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
    os._exit(0)


def _become(command, environment, cwd, files):
    """Makes this process what an interpreter of that command is when it starts."""
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.orig_argv = [sys.executable, *command]
    sys.argv = command if command[0][0] != "-" else [command[0], *command[2:]]
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[0:1] = [str(Path(command[0]).parent) if command[0][0] != "-" else cwd, *folders]
    for folder in folders:
        if (site := Path(folder, "sitecustomize.py")).exists():
            runpy.run_path(str(site))
            break


if __name__ == "__main__":
    import runpy

    import torch  # noqa: F401

    _request = _forked_for_each_request()
    _become(**_request)
    _option, _name = (["", *_request["command"]] if sys.argv[0][0] != "-" else _request["command"])[:2]
    if _option == "-c":
        exec(_name, {"__name__": "__main__"})
    elif _option == "-m":
        runpy.run_module(_name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(_name, run_name="__main__")
