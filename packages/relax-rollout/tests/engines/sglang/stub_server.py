"""A server that speaks SGLang's HTTP calls over a plain module, and fails on demand.

Also a program: its argument is the faults as JSON; it prints its address and ends with its standard input.
"""

import json
import secrets
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from relax_rollout.weights.broadcast import BroadcastSource, Meeting
from relax_rollout.weights.bucket import Bucket, wrong_names
from relax_rollout.weights.files import FileSource
from relax_rollout.weights.ipc import IpcReceiver
from relax_rollout.weights.probe import sees
from relax_rollout.weights.receiver import Receiver
from torch import nn

SHAPES = {"a.weight": (4, 3), "b.weight": (5,), "mtp.c.weight": (2, 2)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        )

    def load_weights(self, weights):
        for name, tensor in weights:
            self.weights[name.replace(".", "_")].data.copy_(tensor)


class Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


class Stub:
    """One server. ``faults`` maps a call to a list of what happens to its next occurrences."""

    def __init__(self) -> None:
        self.faults: dict[str, list[str]] = {}
        self.calls: Counter[str] = Counter()
        self.boots = 0
        self.delay_s = 0.0
        self.shares = ("memory", "file")
        self.boot()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *unused):
                pass

            def do_GET(self):
                self._send(200, {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path, call = self.path, self.path
                if path == "/weights_checker":
                    message = json.loads(body["action"].removeprefix("relax:"))
                    call = message["call"]
                stub.calls[call] += 1
                fault = stub.faults.get(call, [])
                fault = fault.pop(0) if fault else ""
                if fault == "502":
                    return self._send(502, {})
                if fault == "restart":
                    stub.boot()
                if fault in ("hang", "slow"):
                    time.sleep(3 if fault == "hang" else 1)
                if fault == "damage":
                    flip_first_byte(place_of(message))
                try:
                    answer = stub.answer(call, message if path == "/weights_checker" else body)
                except Exception as error:
                    text = {"boot": stub.name, "error": str(error), "kind": type(error).__name__}
                    return self._send(400, {"success": False, "message": json.dumps(text)})
                if fault == "damage":
                    flip_first_byte(place_of(message))
                if fault == "lost":
                    self.close_connection = True
                    return self.connection.close()
                if path == "/weights_checker":
                    answer = {"success": True, "message": json.dumps(answer | {"boot": stub.name})}
                return self._send(200, answer)

            def _send(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = Listening(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def boot(self) -> None:
        self.boots += 1
        self.name = secrets.token_hex(4)
        self.paused = self.released = False
        self.model = Model()
        shapes = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
        self.receiver = Receiver({"target": self.model}, shapes, torch.device("cpu"))
        self.group, self.joined = None, ""
        self.opened = IpcReceiver()

    def answer(self, call, message):
        receiver = self.receiver
        if call == "/pause_generation":
            self.paused = True
        elif call == "/continue_generation":
            self.paused = False
        elif call == "/release_memory_occupation":
            assert not self.released, "released twice"
            self.released = True
        elif call == "/resume_memory_occupation":
            assert self.released, "resumed twice"
            self.released = False
        elif call == "/generate":
            time.sleep(self.delay_s)
            if isinstance(message["sampling_params"], dict):
                return self.draw(message["input_ids"], message["sampling_params"]["max_new_tokens"])
            asked = zip(message["input_ids"], message["sampling_params"], strict=True)
            return [self.draw(prompt, sampling["max_new_tokens"]) for prompt, sampling in asked]
        elif call in ("describe", "status"):
            return {
                "version": receiver.version,
                "paused": self.paused,
                "released": self.released,
                "running": 0,
                "waiting": 0,
                "manifest": receiver.manifest(),
                "vocabulary": 5000,
                "context": 99,
                "dtype": "float32",
                "device": "cpu",
                "parameters": 21,
            }
        elif call == "begin":
            receiver.begin(message["update"], message["version"])
        elif call == "connect":
            meeting = Meeting(**message["meeting"])
            if self.joined != meeting.name:
                self.group, self.joined = meeting.join(message["first_rank"]), meeting.name
        elif call == "sees":
            (handle,) = message["handles"]
            return {"sees": json.loads(handle)[0] in self.shares and sees(handle, torch.device("cpu"))}
        elif call == "receive":
            (part,) = message["parts"]
            bucket = Bucket.from_json(part)
            if bucket.file is not None:
                source = FileSource(bucket.file)
            elif bucket.handle is not None:
                source = self.opened.source(bucket.handle)
            else:
                source = BroadcastSource(self.group)
            received = receiver.receive(message["update"], message["bucket"], bucket, source)
            return {"damaged": wrong_names(bucket.entries, received)}
        elif call == "commit":
            assert self.paused, "committed while it serves"
            receiver.replay = message["replay"]
            return receiver.commit(message["update"], message["buckets"])
        elif call == "discard":
            receiver.discard()
        return {}

    def draw(self, prompt, count):
        """The prompt's first token again and again, so that every answer shows whose it is."""
        return {
            "output_ids": [prompt[0]] * count,
            "meta_info": {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-0.5, prompt[0], None]] * count,
                "relax_versions": [self.receiver.version] * count,
            },
        }

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def place_of(message) -> Path:
    """Where the bucket of a message is, as a file."""
    (part,) = message["parts"]
    return Path(part["file"] if "file" in part else json.loads(part["handle"])["path"])


def flip_first_byte(path: Path) -> None:
    """In place: whoever has the file mapped sees it."""
    with path.open("r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))


if __name__ == "__main__":
    server = Stub()
    server.faults = json.loads(sys.argv[1])
    server.shares = server.faults.pop("shares", server.shares)
    sys.stdout.write(server.url + "\n")
    sys.stdout.flush()
    sys.stdin.read()
