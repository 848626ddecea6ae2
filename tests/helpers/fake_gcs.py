"""A bucket server on loopback that speaks as much of Cloud Storage as runs need.

gcsfs and TensorStore talk to it as to the real one (JSON API: metadata, media, lists,
inserts, deletes, rewrites, generations as preconditions). Objects are whole and appear
at once, cannot be renamed or appended to, and there are no directories: what makes a
bucket differ from a disk.

  python tests/helpers/fake_gcs.py BUCKET SECONDS

serves an empty bucket until its input ends; each answer takes so many seconds. It
prints its address.
"""

import base64
import contextlib
import email
import hashlib
import http.server
import json
import re
import sys
import threading
import time
import urllib.parse

import google_crc32c  # comes with gcsfs
import pytest


class Bucket(http.server.BaseHTTPRequestHandler):
    """One request; `server.objects` is {(bucket, name): (generation, bytes)}."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _reply(self, code, body=b"", kind="application/json", headers=()):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, code, message):
        self._reply(code, {"error": {"code": code, "message": message, "errors": []}})

    def _meta(self, key):
        generation, data = self.server.objects[key]
        bucket, name = key
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": bucket,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(data)),
            "storageClass": "STANDARD",
            "contentType": "application/octet-stream",
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            "crc32c": base64.b64encode(google_crc32c.Checksum(data).digest()).decode(),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }

    def _parsed(self):
        url = urllib.parse.urlsplit(self.path)
        query = {k: v[0] for k, v in urllib.parse.parse_qs(url.query).items()}
        match = re.match(
            r"(?P<kind>/upload|/download)?/storage/v1/b/(?P<b>[^/]+)(?:/o(?:/(?P<o>.*))?)?$",
            url.path,
        )
        if not match:
            return url.path, None, None, query
        name = match["o"]
        name = None if name is None else urllib.parse.unquote(name)
        return match["kind"] or "", match["b"], name, query

    def _holds(self, key, query):
        """Whether the precondition on the generation holds; answers if not."""
        now = self.server.objects.get(key, (0, b""))[0]
        want, not_want = (
            query.get(x) for x in ("ifGenerationMatch", "ifGenerationNotMatch")
        )
        if want is not None and int(want) != now:
            self._fail(412, "conditionNotMet")
        elif not_want is not None and int(not_want) == now:
            self._fail(304, "notModified")
        else:
            return True
        return False

    def do_GET(self):
        time.sleep(self.server.latency)
        kind, bucket, name, query = self._parsed()
        self.server.requests.append(("GET", self.path))
        if bucket is None or bucket not in self.server.buckets:
            return self._fail(404, f"no bucket {bucket}")
        if name is None and not self.path.split("?")[0].endswith("/o"):
            return self._reply(200, {"kind": "storage#bucket", "name": bucket})
        if name is None:
            return self._reply(200, self._listing(bucket, query))
        key = bucket, name
        if key not in self.server.objects:
            return self._fail(404, f"no object {name}")
        if not self._holds(key, query):
            return None
        if query.get("alt") != "media":
            return self._reply(200, self._meta(key))
        generation, data = self.server.objects[key]
        headers = [("x-goog-generation", str(generation))]
        want = re.match(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not want or not data:
            return self._reply(200, data, "application/octet-stream", headers)
        first, last = want[1], want[2]
        start = int(first) if first else max(len(data) - int(last), 0)
        end = min(int(last) + 1 if first and last else len(data), len(data))
        if start >= len(data):
            return self._fail(416, "range")
        headers.append(("Content-Range", f"bytes {start}-{end - 1}/{len(data)}"))
        return self._reply(206, data[start:end], "application/octet-stream", headers)

    do_HEAD = do_GET

    def _listing(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, prefixes = [], set()
        with self.server.lock:
            names = sorted(n for b, n in self.server.objects if b == bucket)
            for name in names:
                if not name.startswith(prefix):
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
                elif name >= query.get("startOffset", ""):
                    items.append(self._meta((bucket, name)))
        page = {"kind": "storage#objects", "items": items}
        return page | ({"prefixes": sorted(prefixes)} if prefixes else {})

    def _body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while True:
                size = int(self.rfile.readline().split(b";")[0], 16)
                chunk = self.rfile.read(size)
                self.rfile.readline()
                if not size:
                    return data
                data += chunk
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _put(self, key, data, query):
        with self.server.lock:
            if not self._holds(key, query):
                return
            self.server.count += 1
            self.server.objects[key] = self.server.count, data
        self._reply(200, self._meta(key))

    def do_POST(self):
        if self.path.startswith("/upload/session/"):  # as gcsfs sends its pieces
            return self.do_PUT()
        kind, bucket, name, query = self._parsed()
        body = self._body()
        self.server.requests.append(("POST", self.path))
        if kind == "/upload":
            how = query.get("uploadType")
            if how == "resumable":
                fields = json.loads(body or b"{}")
                name = query.get("name") or fields["name"]
                self.server.count += 1
                session = str(self.server.count)
                self.server.uploads[session] = [(bucket, name), query, b""]
                place = f"http://{self.headers['Host']}/upload/session/{session}"
                return self._reply(200, {}, headers=[("Location", place)])
            if how == "multipart":
                head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
                meta, media = email.message_from_bytes(head + body).get_payload()
                name = query.get("name") or json.loads(meta.get_payload())["name"]
                # The parser changes line ends: cut the bytes out ourselves.
                mark = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[
                    1
                ]
                part = body.split(b"--" + mark.encode())[2]
                # gcsfs ends lines with \n alone, others as the standard has it.
                end = b"\r\n" if b"\r\n\r\n" in part else b"\n"
                body = part.split(2 * end, 1)[1].removesuffix(end)
            else:
                name = query["name"]
            return self._put((bucket, name), body, query)
        copied = re.match(r"(.*)/(?:rewriteTo|copyTo)/b/([^/]+)/o/(.*)", name or "")
        if copied:
            source = self.server.objects.get((bucket, copied[1]))
            if source is None:
                return self._fail(404, "no source")
            self.server.count += 1
            key = copied[2], copied[3]
            self.server.objects[key] = self.server.count, source[1]
            meta = self._meta(key)
            return self._reply(200, {"done": True, "resource": meta} | meta)
        return self._fail(400, f"POST {self.path}")

    def do_PUT(self):
        session = self.path.rsplit("/", 1)[1].split("?")[0]
        body = self._body()
        upload = self.server.uploads.get(session)
        if upload is None:
            return self._fail(404, "no upload")
        upload[2] += body
        total = self.headers.get("Content-Range", "").rpartition("/")[2]
        if total in ("", "*") and self.headers.get("Content-Range"):
            last = max(len(upload[2]) - 1, 0)
            return self._reply(308, headers=[("Range", f"bytes=0-{last}")])
        del self.server.uploads[session]
        return self._put(upload[0], upload[2], upload[1])

    def do_DELETE(self):
        _, bucket, name, query = self._parsed()
        self.server.requests.append(("DELETE", self.path))
        with self.server.lock:
            if (bucket, name) not in self.server.objects:
                return self._fail(404, "no object")
            if not self._holds((bucket, name), query):
                return None
            del self.server.objects[bucket, name]
        return self._reply(204)


class Server(http.server.ThreadingHTTPServer):
    """One that says nothing where a client hangs up."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def variables(address):
    """The environment in which clients ask the server of an address."""
    return {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "NO_GCE_CHECK": "true",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
    }


@contextlib.contextmanager
def serve(*buckets, latency=0.0):
    """A server with these empty buckets; yields it, and sets the environment."""
    server = Server(("127.0.0.1", 0), Bucket)
    server.latency = latency  # seconds before each answer
    server.buckets, server.objects, server.uploads = {*buckets}, {}, {}
    server.requests, server.lock, server.count = [], threading.RLock(), 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(address).items():
            patch.setenv(name, value)
        yield server
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    with serve(sys.argv[1], latency=float(sys.argv[2])) as running:
        print(f"http://127.0.0.1:{running.server_port}", flush=True)
        sys.stdin.read()
