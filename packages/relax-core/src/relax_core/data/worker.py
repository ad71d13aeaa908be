"""The program inside a data worker: `python -m relax_core.data.worker FD`, a pipe that it inherits.

It is sent a builder, then chunks of rows, and answers each with what it gave, or with a traceback as text. It
ends once the pipe is closed.
"""

import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from relax_core.data.prepare import prepare


def serve(connection: "Connection[Any, Any]") -> None:
    """Answers until the pipe is closed."""
    with suppress(EOFError, OSError):
        answer: Any = None
        while True:
            try:
                if answer is None:
                    builder = connection.recv()
                answer = prepare(builder, connection.recv())
            except (EOFError, OSError):
                return
            # Whatever a row, a template or a decoder does is told to the process that waits for the chunk.
            except Exception:
                answer = traceback.format_exc()
            connection.send(answer)


def main() -> None:
    """The program."""
    # The process that waits decides what Ctrl-C means; it closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Workers are the parallelism; threads of the tokenizer in each would only wait for one another.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
