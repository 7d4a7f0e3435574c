# SPDX-License-Identifier: BSD-3-Clause
"""A package index on this machine, to rehearse a release: it takes what twine uploads, and pip installs from
it."""

import contextlib
import email.parser
import email.policy
import hashlib
import html
import http.server
import re
import threading
import urllib.parse
from pathlib import Path


def _handler(folder):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            project = re.fullmatch(r"/simple/([^/]+)/", path)
            file = folder / Path(path).name
            if project:
                files = [f for f in sorted(folder.iterdir()) if _project(f.name) == project[1]]
                self._answer(200 if files else 404, _page(files).encode(), "text/html")
            elif path.startswith("/files/") and file.is_file():
                self._answer(200, file.read_bytes(), "application/octet-stream")
            else:
                self._answer(404)

        def do_POST(self):
            """The upload that twine makes: a form with the file and its digest."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
            fields = {
                part.get_param("name", header="Content-Disposition"): part for part in form.iter_parts()
            }
            content = fields["content"].get_payload(decode=True)
            file = folder / Path(fields["content"].get_filename()).name
            expected = fields["sha256_digest"].get_payload().strip()
            if hashlib.sha256(content).hexdigest() != expected:
                self._answer(400, b"the digest differs")
            elif file.exists():
                self._answer(409, b"this file exists")
            else:
                file.write_bytes(content)
                self._answer(200)

        def _answer(self, status, body=b"", kind="text/plain"):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler


def _project(file_name):
    """The normalized name of the project of a wheel or an sdist."""
    return re.sub(r"[-_.]+", "-", file_name.partition("-")[0]).lower()


def _page(files):
    links = (
        f'<a href="/files/{urllib.parse.quote(f.name)}#sha256={hashlib.sha256(f.read_bytes()).hexdigest()}">'
        f"{html.escape(f.name)}</a>"
        for f in files
    )
    return "<!DOCTYPE html><html><body>" + "<br>".join(links) + "</body></html>"


@contextlib.contextmanager
def serve(folder):
    """Serves a folder for the time of a ``with`` block. The value is the address; PEP 503 pages are in
    ``simple/``."""
    folder.mkdir(parents=True, exist_ok=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
