"""A builder for tests of workers, light enough to be imported in each of them."""

import os
import signal

from relax_core.data.length import LengthRule


class Recording:
    """Its examples are (what the row says, the process that read it); some rows end or fail the process."""

    length = LengthRule(None, "refuse")

    def draft(self, row):
        match row.fields["do"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail":
                raise KeyError("no such thing")
        return [row.fields["do"]]

    def finish(self, drafts):
        yield from ((draft, os.getpid()) for draft in drafts)
