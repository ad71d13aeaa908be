"""A router that speaks sglang-router's HTTP calls: requests in turn to the workers that it has."""

import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StubRouter:
    def __init__(self, urls):
        self.workers = list(urls)
        self.sent = []
        router = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *unused):
                pass

            def do_GET(self):
                known = [
                    {"id": url.rpartition(":")[2], "url": url, "is_healthy": True} for url in router.workers
                ]
                self._send(200, {"workers": known})

            def do_DELETE(self):
                port = self.path.rpartition("/")[2]
                router.workers = [url for url in router.workers if not url.endswith(f":{port}")]
                self._send(202, {})

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/workers":
                    router.workers.append(json.loads(body)["url"])
                    return self._send(202, {})
                if not isinstance(json.loads(body)["rid"], str):
                    return self._send(422, {"error": "rid: expected a string"})
                if not router.workers:
                    return self._send(503, {})
                url = router.workers[len(router.sent) % len(router.workers)]
                router.sent.append(url)
                request = urllib.request.Request(url + self.path, body, {"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request) as answer:
                        return self._send(answer.status, json.loads(answer.read()))
                except urllib.error.HTTPError as error:
                    return self._send(error.code, {})
                except OSError:
                    return self._send(500, {"error": "the worker went away"})

            def _send(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self):
        self._http.shutdown()
        self._http.server_close()
