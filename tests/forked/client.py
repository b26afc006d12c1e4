"""Run a program as ``python -c`` would, as a fork of what serves at a socket; see ``server.py``.

python client.py SOCKET SOURCE ARGUMENT...
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

_, server, source, *arguments = sys.argv
if "TRITON_INTERPRET" in os.environ:  # read by triton when it is imported, as it is over there
    os.execv(sys.executable, [sys.executable, "-c", source, *arguments])
request = {
    "source": source,
    "arguments": arguments,
    "folder": str(Path.cwd()),
    "environment": dict(os.environ),
}
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
    asking.connect(server)
    socket.send_fds(asking, [b" "], [0, 1, 2])
    asking.sendall(json.dumps(request).encode())
    asking.shutdown(socket.SHUT_WR)
    status = int(asking.recv(64) or -9)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
