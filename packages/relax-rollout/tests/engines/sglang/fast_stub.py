"""A server that speaks as much of SGLang's HTTP calls as sampling needs, for a thousand calls at once.

A program: its argument is the seconds of one request; it prints its address and ends with its standard input.
"""

import asyncio
import json
import os
import sys


async def answer(path, body, delay_s):
    if path == "/generate":
        await asyncio.sleep(delay_s)
        token, count = body["input_ids"][0], body["sampling_params"]["max_new_tokens"]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, token, None]] * count,
            "relax_versions": [0] * count,
        }
        return {"output_ids": [token] * count, "meta_info": meta}
    if path == "/weights_checker":
        facts = {
            "version": 0, "paused": False, "released": False, "running": 0, "waiting": 0, "manifest": {},
            "vocabulary": 5000, "context": 99, "dtype": "float32", "device": "cpu", "parameters": 0,
            "boot": "stub",
        }  # fmt: skip
        return {"success": True, "message": json.dumps(facts)}
    return {}


async def serve(reader, writer, delay_s):
    try:
        while line := await reader.readline():
            path, length = line.split()[1].decode(), 0
            while (header := await reader.readline()).strip():
                name, _, value = header.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            body = json.loads(await reader.readexactly(length)) if length else None
            data = json.dumps(await answer(path, body, delay_s)).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main(delay_s):
    server = await asyncio.start_server(lambda r, w: serve(r, w, delay_s), "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
