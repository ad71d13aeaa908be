"""Scoring given tokens, against a server that answers as SGLang's `/generate` does."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
from relax_rollout import EngineError
from relax_rollout.scoring import score_tokens


class Server:
    """Log-prob of token t after s is -(t + s / 100); `wrong` answers for other tokens."""

    def __init__(self, wrong=False, status=200):
        outer, self.bodies = self, []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.bodies.append(body)
                ids = body["input_ids"][:-1] if wrong else body["input_ids"]
                scored = [[None, ids[0], None]] + [[-(t + s / 100), t, None] for s, t in pairwise(ids)]
                data = json.dumps({"text": "", "meta_info": {"input_token_logprobs": scored}}).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def make_server():
    made = []

    def make(**options):
        made.append(Server(**options))
        return made[-1]

    yield make
    for server in made:
        server.close()


def test_every_token_gets_its_log_prob_and_the_first_none(make_server):
    servers = [make_server(), make_server()]
    found = asyncio.run(score_tokens([s.url for s in servers], [[5, 7, 2], [9], [1, 1]]))
    assert found == [[0.0, -7.05, -2.07], [0.0], [0.0, -1.01]]
    assert [len(server.bodies) for server in servers] == [2, 1]
    assert servers[0].bodies[0]["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


def test_an_answer_for_other_tokens_is_refused(make_server):
    with pytest.raises(EngineError, match="log-probs of 3 tokens and gave those of 2 tokens"):
        asyncio.run(score_tokens([make_server(wrong=True).url], [[5, 7, 2]]))


def test_a_server_that_refuses_or_is_not_there_is_named(make_server):
    refusing = make_server(status=400)
    with pytest.raises(EngineError, match="tokens cannot be scored"):
        asyncio.run(score_tokens([refusing.url], [[5, 7]]))
    gone = make_server()
    gone.close()
    with pytest.raises(EngineError, match="cannot be reached"):
        asyncio.run(score_tokens([gone.url], [[5, 7]], retries=0))


@pytest.mark.parametrize(("urls", "sequences"), [([], [[1]]), (["http://127.0.0.1:1"], [[]])])
def test_nothing_to_ask_or_nobody_is_refused(urls, sequences):
    with pytest.raises(ValueError, match=r"at least one URL|needs a token"):
        asyncio.run(score_tokens(urls, sequences))
